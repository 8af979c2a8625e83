"""A CUDA device on the CPU build of PyTorch, whose streams run as late, or in as odd an order, as CUDA permits.

    PYTHONPATH=tests python -m pytest -p simulated_cuda.plugin tests/gpu

`csrc` is a shared library that takes the place of `libtorch_cuda.so`; `bindings` are the functions of `torch._C` that a
CUDA build has. Both must be there when `torch` is imported, so that all of `torch.cuda` is PyTorch's own code.
"""
