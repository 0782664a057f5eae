"""What each remedy against running out of memory is worth, counted in bytes of tensors that are alive."""
