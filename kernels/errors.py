"""The one error of this package.

ValueError
└── KernelArgumentError   an argument that the op cannot work with; the message names it and shows its value"""


class KernelArgumentError(ValueError):
    """A shape, dtype, stride, device or overlap that an op refuses; nothing was launched or written."""
