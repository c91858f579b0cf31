"""torch.distributed without its types, which don't cover its process group backends or subclasses of them."""

from __future__ import annotations

from typing import Any

import torch.distributed

c10d: Any = torch.distributed
ProcessGroup: Any = torch.distributed.ProcessGroup

__all__ = ["ProcessGroup", "c10d"]
