//! The CUDA device of `megatrain-core`.
