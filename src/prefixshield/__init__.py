"""PrefixShield: a multi-tenant KV-cache manager for LLM serving.

Importing the package loads the policy core alone; vLLM, torch and plotting libraries are loaded
only by the parts that need them.
"""

__version__ = "0.1.0"
