"""The vLLM plugin: loads prepared folders without a conversion. Nothing here is imported by the tool itself."""
