"""The operators of ONNX Runtime that overwrite their input."""

IN_PLACE = {
    *("Relu", "Sigmoid", "Tanh", "Elu", "LeakyRelu", "Selu", "Softplus", "Softsign"),
    *("HardSigmoid", "ThresholdedRelu", "Clip", "Cast", "CastLike", "Softmax", "LogSoftmax"),
}
"""Operators that overwrite their first input if no other node reads it. Arithmetic never does."""
