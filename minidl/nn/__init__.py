"""Layers with PyTorch's names, parameter names and distributions of initial weights. Images are (N, H, W, C)."""

from minidl.engine.parameter import Buffer, Parameter
from minidl.engine.random import random_state, seed, set_random_state
from minidl.nn import init
from minidl.nn.layers import (
    GELU,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    GroupNorm,
    Identity,
    LayerNorm,
    LeakyReLU,
    Linear,
    LogSoftmax,
    MaxPool2d,
    MSELoss,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
    Whitening2d,
    fit_whitening,
)
from minidl.nn.modes import evaluating, watching
from minidl.nn.module import Module, ModuleList, Sequential

__all__ = [
    "GELU", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Buffer", "Conv2d", "CrossEntropyLoss", "Dropout", "Flatten",
    "GlobalAvgPool2d", "GroupNorm", "Identity", "LayerNorm", "LeakyReLU", "Linear", "LogSoftmax", "MSELoss",
    "MaxPool2d", "Module", "ModuleList", "Parameter", "ReLU", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh",
    "Whitening2d", "evaluating", "fit_whitening", "init", "random_state", "seed", "set_random_state", "watching",
]  # fmt: skip
