"""What torch imports in its first step, half a second each: loaded here, before ranks meet."""

from importlib import import_module

for name in (
    "torch._dynamo",  # by the first function that torch keeps from being compiled
    "torch.fx.experimental.symbolic_shapes",  # by the first `torch.autograd.grad`
):
    import_module(name)
