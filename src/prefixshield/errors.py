"""The one exception tree that users of the package see."""


class PrefixShieldError(Exception):
    """Root of every error raised on purpose; its text is fit to be shown to a user as it is."""


class ConfigError(PrefixShieldError):
    """A configuration file cannot be used; names the file, the key, what was found and expected."""


class TraceError(PrefixShieldError):
    """A trace cannot be used; names the file, the line, the key, what was found and expected."""


class IncompatibleEngineError(PrefixShieldError):
    """The installed vLLM or its configuration is not one that the plug-in understands."""
