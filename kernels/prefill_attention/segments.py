"""prefill_attention on Hopper with softmax that begins anew at multiples of a number of keys: off unless asked for.

Few new tokens behind a long prefix are few tiles; cut into segments of their keys, they are work for many programs. The
kernel takes the cases that `hopper` takes, but no window and no heads of more than 128: there all keys are one segment.
"""

from kernels.errors import KernelArgumentError

__all__ = ["check_segment_tokens", "segment_keys"]

# Below it, folding the segments' states costs more than 5 % of a long prompt, and a plan's units are too many.
LEAST_SEGMENT = 4096
# Keys of one tile of the kernel: a segment is whole tiles.
KEY_TILE = 128


def check_segment_tokens(segment_tokens: int) -> None:
    """Raises KernelArgumentError unless keys may be cut so: 0 means not at all."""
    if segment_tokens and (segment_tokens < LEAST_SEGMENT or segment_tokens % KEY_TILE):
        raise KernelArgumentError(
            f"segment_tokens: must be 0 or a multiple of {KEY_TILE} from {LEAST_SEGMENT} on, got {segment_tokens}"
        )


def segment_keys(segment_tokens: int, dim: int, window: int) -> int:
    """Returns the keys of one segment of such layers, or 0: all keys are one.

    Windows have few keys, and wide heads no registers for two states.
    """
    return 0 if window or dim > 128 else segment_tokens
