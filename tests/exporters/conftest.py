"""Models are recorded once for all tests of exports of a process."""

from shared_recordings import models_recorded_once

__all__ = ["models_recorded_once"]
