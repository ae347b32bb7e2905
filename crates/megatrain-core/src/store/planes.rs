//! One unit's planes on the host, and the way of values into and out of them.
use std::str::FromStr;

use crate::adamw::kernels;
use crate::error::{Error, Result};
use crate::host::span::{HostSpan, Plain};
use crate::layout::{Dtype, Master, Precision, Role, TensorLayout, UnitLayout};

/// Elements converted at a time, so that intermediate values stay in the first-level cache.
const BLOCK: usize = 2048;

/// A plane of a tensor's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Plane {
    /// The fp32 weights, put together from both halves where they are split.
    Master,
    /// The weights as the image holds them; of a frozen tensor, its values.
    Weights,
    /// The low 16 bits of a split master.
    Residual,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
}

impl Plane {
    /// Its name on every surface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Weights => "weights",
            Self::Residual => "residual",
            Self::ExpAvg => "exp_avg",
            Self::ExpAvgSq => "exp_avg_sq",
        }
    }
}

impl FromStr for Plane {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [Self::Master, Self::Weights, Self::Residual, Self::ExpAvg, Self::ExpAvgSq]
            .into_iter()
            .find(|plane| plane.name() == name)
            .ok_or_else(|| Error::UnknownPlane { name: name.to_owned() })
    }
}

/// The spans of one unit. Their lengths are those of its layout.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UnitPlanes {
    /// What is sent to the device: see `layout.rs`.
    pub image: HostSpan,
    /// What the master has beside its upper half; `None` under fp32.
    pub residual: Option<HostSpan>,
    /// First moments.
    pub exp_avg: HostSpan,
    /// Second moments.
    pub exp_avg_sq: HostSpan,
}

impl UnitPlanes {
    /// Planes in memory of their own, for a unit on its way to or from a device that holds its state.
    ///
    /// # Errors
    /// [`Error::HostMemory`] when the system refuses.
    pub fn map(layout: &UnitLayout) -> Result<Self> {
        let map = |bytes: u64| HostSpan::map(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(Self {
            image: map(layout.image_bytes)?,
            residual: match layout.precision {
                Precision::Bf16 => Some(map(layout.residual_bytes())?),
                Precision::Fp32 => None,
            },
            exp_avg: map(layout.moment_bytes())?,
            exp_avg_sq: map(layout.moment_bytes())?,
        })
    }

    /// Writes elements of a tensor from `start` on. `Master` takes bf16, fp16, fp32 and fp64 and converts; the other
    /// planes take their own dtype (of the trainable plane the precision's, of a frozen tensor its own, of the residual and
    /// the moments that of the unit's state) and keep it bit for bit; 8-bit moments are counted in bytes of their groups.
    /// A master of 24 bits takes the nearest. Nothing is written when the values are refused.
    ///
    /// # Errors
    /// [`Error`], naming the tensor, for a plane that it does not have, a wrong dtype, a range that leaves it,
    /// and the first value of a master or a moment that is not finite in fp32.
    pub fn write(
        &self,
        layout: &UnitLayout,
        tensor: usize,
        plane: Plane,
        start: u64,
        dtype: Dtype,
        source: &[u8],
    ) -> Result<()> {
        let tensor = find(layout, tensor)?;
        if plane == Plane::Master {
            trainable(tensor, plane)?;
            elements_in(tensor, start, source.len(), dtype, tensor.spec.numel())?;
            if !matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32 | Dtype::F64) {
                return Err(wrong_dtype(tensor, plane, "bf16, f16, f32 or f64", dtype));
            }
            check_finite(tensor, plane, start, dtype, source)?;
            self.write_master(layout, tensor, start, dtype, source);
            return Ok(());
        }
        let (span, own) = self.raw(layout, tensor, plane)?;
        check_stored(tensor, plane, own, start, dtype, source)?;
        let len = elements_in(tensor, start, source.len(), own, span.len() as u64 / own.size())?;
        slice(&span, start * own.size(), len * own.size()).copy_from(source);
        Ok(())
    }

    /// Reads elements of a tensor from `start` on, as many as `out` holds: fp32 for `Master`, otherwise as the plane is
    /// stored (8-bit moments in bytes of their groups).
    ///
    /// # Errors
    /// [`Error`], naming the tensor, for a plane that it does not have or a range that leaves it.
    pub fn read(&self, layout: &UnitLayout, tensor: usize, plane: Plane, start: u64, out: &mut [u8]) -> Result<()> {
        let tensor = find(layout, tensor)?;
        if plane == Plane::Master {
            trainable(tensor, plane)?;
            let len = elements_in(tensor, start, out.len(), Dtype::F32, tensor.spec.numel())?;
            let first = tensor.element + start;
            let Some(residual) = &self.residual else {
                slice(&self.image, first * 4, len * 4).copy_to(out);
                return Ok(());
            };
            let hi = self.image.elements::<u16>(first, len);
            let mut values = [0f32; BLOCK];
            for ((hi, start), out) in hi.chunks(BLOCK).zip((first..).step_by(BLOCK)).zip(out.chunks_mut(BLOCK * 4)) {
                let values = &mut values[..hi.len()];
                match layout.state.master {
                    Master::Bits32 => {
                        kernels::join_master(hi, &residual.elements::<u16>(start, hi.len() as u64), values);
                    }
                    Master::Bits24 => {
                        kernels::join_master_24(hi, &residual.elements::<u8>(start, hi.len() as u64), values);
                    }
                }
                for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *out = value.to_ne_bytes();
                }
            }
            return Ok(());
        }
        let (span, own) = self.raw(layout, tensor, plane)?;
        let len = elements_in(tensor, start, out.len(), own, span.len() as u64 / own.size())?;
        slice(&span, start * own.size(), len * own.size()).copy_to(out);
        Ok(())
    }

    /// The tensor's part of a plane that is stored as it is, and its dtype.
    fn raw(&self, layout: &UnitLayout, tensor: &TensorLayout, plane: Plane) -> Result<(HostSpan, Dtype)> {
        let numel = tensor.spec.numel();
        let in_plane = |span: &HostSpan, size: u64| slice(span, tensor.element * size, numel * size);
        let stored = layout.state.moments;
        let moments = |span: &HostSpan| slice(span, stored.bytes(tensor.element), stored.bytes(numel));
        if plane == Plane::Weights {
            let dtype = match tensor.spec.role {
                Role::Trainable => layout.precision.dtype(),
                Role::Frozen => tensor.spec.dtype,
            };
            return Ok((slice(&self.image, tensor.byte, numel * dtype.size()), dtype));
        }
        trainable(tensor, plane)?;
        match plane {
            Plane::Residual => {
                let none = || Error::NoResidual { tensor: tensor.spec.name.clone() };
                let residual = self.residual.as_ref().ok_or_else(none)?;
                Ok((in_plane(residual, layout.residual_size()), layout.state.residual_dtype()))
            }
            Plane::ExpAvg => Ok((moments(&self.exp_avg), stored.dtype())),
            Plane::ExpAvgSq => Ok((moments(&self.exp_avg_sq), stored.dtype())),
            Plane::Master | Plane::Weights => unreachable!("both are dealt with before"),
        }
    }

    /// Values that have been checked.
    fn write_master(&self, layout: &UnitLayout, tensor: &TensorLayout, start: u64, dtype: Dtype, source: &[u8]) {
        let mut at = tensor.element + start;
        widened(dtype, source, |values| {
            let len = values.len() as u64;
            match (&self.residual, layout.precision) {
                (Some(residual), Precision::Bf16) => {
                    let mut hi = self.image.elements_mut::<u16>(at, len);
                    match layout.state.master {
                        Master::Bits32 => {
                            kernels::split_master(values, &mut hi, &mut residual.elements_mut::<u16>(at, len));
                        }
                        Master::Bits24 => {
                            kernels::split_master_24(values, &mut hi, &mut residual.elements_mut::<u8>(at, len));
                        }
                    }
                }
                _ => self.image.elements_mut::<f32>(at, len).copy_from_slice(values),
            }
            at += len;
            true
        });
    }
}

pub(crate) fn slice(span: &HostSpan, offset: u64, len: u64) -> HostSpan {
    let fits = "a layout's offsets lie inside its spans";
    span.slice(usize::try_from(offset).expect(fits), usize::try_from(len).expect(fits))
}

fn find(layout: &UnitLayout, tensor: usize) -> Result<&TensorLayout> {
    let unknown = || Error::UnknownTensor { unit: layout.name.clone(), index: tensor, tensors: layout.tensors.len() };
    layout.tensors.get(tensor).ok_or_else(unknown)
}

fn trainable(tensor: &TensorLayout, plane: Plane) -> Result<()> {
    match tensor.spec.role {
        Role::Trainable => Ok(()),
        Role::Frozen => {
            Err(Error::Frozen { tensor: tensor.spec.name.clone(), what: plane.name(), dtype: tensor.spec.dtype.name() })
        }
    }
}

fn wrong_dtype(tensor: &TensorLayout, plane: Plane, wanted: &'static str, got: Dtype) -> Error {
    let what = format!("{}: {}", tensor.spec.name, plane.name());
    Error::WrongDtype { what, expected: wanted, got: got.name() }
}

/// How many whole elements `bytes` are, all of them among the `numel` that the tensor has in the plane.
pub(crate) fn elements_in(tensor: &TensorLayout, start: u64, bytes: usize, dtype: Dtype, numel: u64) -> Result<u64> {
    let (bytes, size) = (bytes as u64, dtype.size());
    if !bytes.is_multiple_of(size) {
        let tensor = tensor.spec.name.clone();
        return Err(Error::PartialElement { tensor, bytes: bytes as usize, dtype: dtype.name() });
    }
    let len = bytes / size;
    if start.checked_add(len).is_none_or(|end| end > numel) {
        return Err(Error::OutOfBounds { tensor: tensor.spec.name.clone(), start, len, numel });
    }
    Ok(len)
}

/// What may be written into a plane that is stored as it is, in its own dtype.
///
/// # Errors
/// [`Error`], naming the tensor, for another dtype and the first value of a moment that is not finite.
pub(crate) fn check_stored(
    tensor: &TensorLayout,
    plane: Plane,
    own: Dtype,
    start: u64,
    dtype: Dtype,
    source: &[u8],
) -> Result<()> {
    if own != dtype {
        return Err(wrong_dtype(tensor, plane, own.name(), dtype));
    }
    // Whatever the bytes of 8-bit moments, they are numbers.
    if matches!(plane, Plane::ExpAvg | Plane::ExpAvgSq) && dtype != Dtype::U8 {
        check_finite(tensor, plane, start, dtype, source)?;
    }
    Ok(())
}

fn check_finite(tensor: &TensorLayout, plane: Plane, start: u64, dtype: Dtype, source: &[u8]) -> Result<()> {
    let mut at = start;
    let mut bad = None;
    widened(dtype, source, |values| {
        if let Some(i) = kernels::first_non_finite(values) {
            bad = Some((at + i as u64, values[i]));
        }
        at += values.len() as u64;
        bad.is_none()
    });
    bad.map_or(Ok(()), |(index, value)| {
        let (tensor, plane) = (tensor.spec.name.clone(), plane.name());
        Err(Error::NotFinite { tensor, plane, index, value })
    })
}

/// Hands `source` on as fp32, block by block, until `take` returns false.
fn widened(dtype: Dtype, source: &[u8], mut take: impl FnMut(&[f32]) -> bool) {
    let mut values = [0f32; BLOCK];
    match dtype {
        Dtype::F32 => blocks(source, f32::from_ne_bytes, |block: &[f32]| take(block)),
        Dtype::Bf16 => blocks(source, u16::from_ne_bytes, |block: &[u16]| {
            kernels::bf16_to_f32(block, &mut values[..block.len()]);
            take(&values[..block.len()])
        }),
        Dtype::F16 => blocks(source, u16::from_ne_bytes, |block: &[u16]| {
            kernels::f16_to_f32(block, &mut values[..block.len()]);
            take(&values[..block.len()])
        }),
        Dtype::F64 => blocks(source, f64::from_ne_bytes, |block: &[f64]| {
            kernels::f64_to_f32(block, &mut values[..block.len()]);
            take(&values[..block.len()])
        }),
        other => unreachable!("callers admit floating-point dtypes only, not {other:?}"),
    }
}

/// The bytes as numbers, of any alignment, block by block, until `take` returns false.
fn blocks<T: Plain + Default, const N: usize>(
    source: &[u8],
    from_bytes: impl Fn([u8; N]) -> T,
    mut take: impl FnMut(&[T]) -> bool,
) {
    let mut block = [T::default(); BLOCK];
    for bytes in source.chunks(BLOCK * N) {
        let (numbers, _) = bytes.as_chunks::<N>();
        for (to, &from) in block.iter_mut().zip(numbers) {
            *to = from_bytes(from);
        }
        if !take(&block[..numbers.len()]) {
            return;
        }
    }
}
