//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) over slices, in the order of operations of `torch.optim.AdamW`:
//! coefficients, loops, the global norm and clipping. Knows neither devices nor planes.
pub mod clip;
#[expect(unsafe_code, reason = "vector loads and stores, floating-point mode")]
pub mod kernels;
mod scalars;

pub use self::kernels::Isa;
pub use self::scalars::AdamwScalars;
