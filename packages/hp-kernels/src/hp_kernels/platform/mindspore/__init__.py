"""The kernels as ops of this framework; importing it loads the framework."""
