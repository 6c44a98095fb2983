"""The torch backend: run a schedule on real ranks through torch.distributed."""

import warnings
from importlib import import_module

from zsim_torch.backend import TorchBackend as TorchBackend
from zsim_torch.module.description import describe as describe
from zsim_torch.module.initializer import Initializer as Initializer
from zsim_torch.module.meta_model import model_from as model_from
from zsim_torch.run_option import Option as Option
from zsim_torch.step_metrics import StepMetrics as StepMetrics
from zsim_torch.supervise.ranks import RankPool as RankPool
from zsim_torch.supervise.ranks import run_ranks as run_ranks
from zsim_torch.train import Trained as Trained
from zsim_torch.train import train as train
from zsim_torch.trainer import Trainer as Trainer


def __getattr__(name: str) -> object:
    """Return the recorder under its former name, with a warning, for one release."""
    if name != "recording":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "zsim_torch.recording is now zsim_record.recording", DeprecationWarning, stacklevel=2
    )
    return import_module("zsim_record").recording
