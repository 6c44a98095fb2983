"""What tests of real ranks and recordings share in one process.

Autograd counts devices at the first backward of a process, so the pretended device of recordings
has to be known before any test here runs one.
"""

from zsim_torch.record.script_surroundings import register_device

register_device()
