"""Matrix products for prompts, written in CuTeDSL (NVIDIA's `nvidia-cutlass-dsl`) and compiled ahead into objects with the C interface that
the kernels of ../cuda have. See docs/kernels.md.

Only compile.py and what it imports (gemm_sm90.py, gemm_sm90_grouped.py, gemm_sm100.py, gemm_sm100_grouped.py, persistent.py) import the
DSL, and only build.py's child process imports them: a program that finds its objects in the cache, or that runs on a CPU, needs no DSL.
"""
