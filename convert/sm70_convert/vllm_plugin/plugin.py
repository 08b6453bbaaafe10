"""The entry point that vLLM calls in each of its processes, more than once in some."""

from sm70_convert.vllm_plugin import compat, loader, method, record


def register() -> None:
    """Adds the load formats, and lets prepared folders through: to the MoE methods of a V100 runtime, else to the reference."""
    loader.register()
    method.register()
    record.register()
    if not compat.is_sm70_runtime():
        _register_reference()


def _register_reference() -> None:
    try:
        from sm70_convert.vllm_plugin import stock
    except ImportError as exc:
        # Other models must still start; a prepared folder is stopped by the loader.
        compat.logger.warning("sm70-convert: this vLLM cannot serve prepared folders (tried on 0.32.0): %s", exc)
    else:
        stock.register()
