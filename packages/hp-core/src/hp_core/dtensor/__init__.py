"""Distributed tensors: the type, its dispatch, its gradients, and how to make one."""
