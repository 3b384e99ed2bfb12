"""The vLLM plug-in: the only part of the package that imports vLLM."""
