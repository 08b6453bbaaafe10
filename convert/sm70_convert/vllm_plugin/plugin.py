"""The entry point that vLLM calls in each of its processes, more than once in some."""

from sm70_convert.vllm_plugin import loader, method, record


def register() -> None:
    """Adds the load formats, and lets prepared folders through to the runtime's MoE methods."""
    loader.register()
    method.register()
    record.register()
