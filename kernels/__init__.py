"""GPU operations of LLM serving, on paged keys and values and on slots of recurrent states; one folder for each op.

Tensors come in, tensors go out. Each folder holds the op itself (`__init__`: it checks its arguments and chooses), the
Triton kernel with its launcher (`triton`), the torch reference that is the truth for the tests and what a worker
without a GPU serves with (`reference`), and where it pays a plan of a step's work (`plan`, `plan_triton`,
`splits_triton`) and a Gluon kernel for Hopper (`hopper`).

    from kernels.copy_pages import pack_pages, unpack_pages
    from kernels.rms_norm import rms_norm

docs/kernels.md lists the ops.
"""
