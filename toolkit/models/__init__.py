"""Models with exactly the shapes of the papers, and small models for the digits."""

from toolkit.models.digits_cnn import digits_cnn
from toolkit.models.digits_resnet import digits_resnet
from toolkit.models.femnist_cnn import fashion_cnn, femnist_cnn
from toolkit.models.imdb_bilstm import imdb_bilstm
from toolkit.models.mnist_dnn import mnist_dnn
from toolkit.models.resnet18 import resnet18, resnet34, resnet34_tiny_imagenet
from toolkit.models.resnet20 import fashion_resnet20, resnet20
from toolkit.models.vgg8 import vgg8

__all__ = [
    "digits_cnn",
    "digits_resnet",
    "fashion_cnn",
    "fashion_resnet20",
    "femnist_cnn",
    "imdb_bilstm",
    "mnist_dnn",
    "resnet18",
    "resnet20",
    "resnet34",
    "resnet34_tiny_imagenet",
    "vgg8",
]
