"""Models: loading, anatomy, taps, contributions. `EMBEDDED` holds the models that come with the package."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "embedded"
