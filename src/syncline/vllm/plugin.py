"""Entry point `vllm.general_plugins`: makes the backend `syncline` known in every process of a vLLM."""

from __future__ import annotations

BACKEND = "syncline"


def register() -> None:
    """Register the weight-transfer engine; harmless when called again.

    Nothing is refused here: this runs in every vLLM on a machine that has Syncline installed. The engine
    checks the version when it is asked for.
    """
    # vLLM calls this, so it is there.
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "syncline.vllm.engine", "SynclineWeightTransferEngine"
        )
    except ValueError:
        if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no other door
            raise
