"""The import paths that existing scripts use: `hyper_parallel.core.tensor_parallel` and its like.

Each module here only names what `hyper_parallel.exports` lists for it; the code is in the components.
"""
