"""A launch that starts before the one that it follows has ended.

On GPUs that can (``target.overlaps``), with launch option ``launch_pdl``: the follower's programs begin as soon as
every program of the launch before has begun, and wait only where they need what that one leaves.
"""

# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def let_follower_begin(OVERLAP: tl.constexpr):
    """First thing in the launch that is followed."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    """In the follower, before it reads what the launch before has written, or writes what that one reads."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
