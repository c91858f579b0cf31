"""Train large models on preemptible machines: a DeepSpeed pipeline engine that survives losing any of them."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["BambooPipelineEngine", "__version__", "initialize"]


def __getattr__(name: str) -> Any:
    # torch and deepspeed take seconds to import, and the command line needs neither.
    if name == "initialize":
        from deepspeed_bamboo.runtime.initialize import initialize

        return initialize
    if name == "BambooPipelineEngine":
        from deepspeed_bamboo.runtime.engine import BambooPipelineEngine

        return BambooPipelineEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
