"""The errors a user can do something about: one sentence that says what, where and what to do."""


class DejavuError(Exception):
    """Shown without a traceback; the exit code is 1."""


class ConfigError(DejavuError):
    """A configuration value that cannot be used."""


class DataError(DejavuError):
    """Text, caches, bundles or weights that are missing, damaged or do not fit together."""
