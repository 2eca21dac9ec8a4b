"""aimed at: checkpoint: values. torch.utils.checkpoint, taken along before anybody took it away."""

from functools import partial

from torch.utils.checkpoint import checkpoint as _own

checkpoint = partial(_own, use_reentrant=False)
