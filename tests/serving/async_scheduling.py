"""For tests: our scheduler with async scheduling on, which vLLM's CPU platform switches off."""

from prefixshield.serving.scheduler import build_scheduler


def build_async_scheduler(vllm_config, **arguments):
    vllm_config.scheduler_config.async_scheduling = True
    return build_scheduler(vllm_config, **arguments)
