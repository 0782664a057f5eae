"""What each framework adds: its ops over the native kernels, and the twins made of its own ops."""
