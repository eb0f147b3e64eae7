"""Models with exactly the papers' shapes, and the small one that the demo trains."""

from toolkit.models.digits_cnn import digits_cnn
from toolkit.models.resnet20 import resnet20

__all__ = ["digits_cnn", "resnet20"]
