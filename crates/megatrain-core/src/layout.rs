//! The offset of each tensor in its unit's flat planes: one layout for every tier.
//!
//! A unit's *image* is what is sent to the device in one contiguous copy: the trainable plane (bf16 upper halves, or
//! fp32 weights) followed by the frozen tensors and buffers, each in its own dtype. Residual and moments share the
//! trainable plane's element offsets.
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Elements to which every trainable tensor's start is aligned: 256 bytes of bf16, 512 of fp32.
pub const TENSOR_ALIGN: u64 = 128;
/// Elements to which a unit's trainable plane is padded: 4 KiB of bf16, 8 KiB of fp32.
pub const UNIT_ALIGN: u64 = 2048;
/// Elements of one block of the gradient norm: blocks never straddle parameters, so that how parameters are grouped
/// into units does not change the norm.
pub const NORM_BLOCK: u64 = 65536;
/// Bytes of a group of [`TENSOR_ALIGN`] 8-bit moments: a code each, and a scale for every 32.
pub const MOMENT_GROUP_BYTES: u64 = TENSOR_ALIGN + TENSOR_ALIGN / 32;
/// Elements of the largest unit, so that no sum of bytes over its planes overflows.
const MOST_ELEMENTS: u64 = 1 << 59;

/// Element types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Dtype {
    Bf16,
    F16,
    F32,
    F64,
    I64,
    I32,
    I16,
    I8,
    U8,
    Bool,
}

impl Dtype {
    /// Bytes an element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Its name on every surface.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I16 => "i16",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::Bool => "bool",
        }
    }
}

/// How the weights are stored and sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// An exact fp32 master in two 16-bit planes, whose upper one (bf16) is what the device computes with.
    Bf16,
    /// fp32 weights, stored and sent as they are.
    Fp32,
}

impl Precision {
    /// The dtype of the trainable plane of an image.
    #[must_use]
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::Fp32 => Dtype::F32,
        }
    }
}

/// How AdamW's moments are stored between two updates. Each update computes in fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Moments {
    /// As they are.
    #[default]
    Fp32,
    /// In bf16, rounded stochastically.
    Bf16,
    /// Companded to 8 bits, with a scale for every 32 elements: see [`crate::adamw::kernels::compact`].
    #[serde(rename = "8bit")]
    Bits8,
}

impl Moments {
    /// The dtype of what is stored; groups of 8-bit moments are bytes.
    #[must_use]
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
            Self::Bits8 => Dtype::U8,
        }
    }

    /// How many values of that dtype hold `elements` moments: whole groups of 132 bytes for 128 elements of 8 bits.
    #[must_use]
    pub const fn stored(self, elements: u64) -> u64 {
        match self {
            Self::Fp32 | Self::Bf16 => elements,
            Self::Bits8 => elements.div_ceil(TENSOR_ALIGN) * MOMENT_GROUP_BYTES,
        }
    }

    /// Bytes of `elements` moments of one kind. Where they are 8-bit ones, a range begins at a multiple of
    /// [`TENSOR_ALIGN`], so that this is also where it begins in its plane.
    #[must_use]
    pub const fn bytes(self, elements: u64) -> u64 {
        self.stored(elements) * self.dtype().size()
    }
}

/// How many bits of the fp32 master are kept under [`Precision::Bf16`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Master {
    /// All of them: 16 beside the weights.
    #[default]
    #[serde(rename = "32bit")]
    Bits32,
    /// The upper 24, rounded stochastically: 8 beside the weights.
    #[serde(rename = "24bit")]
    Bits24,
}

/// How the optimizer's state is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateFormat {
    /// First and second moments.
    pub moments: Moments,
    /// What the master keeps.
    pub master: Master,
}

impl StateFormat {
    /// Bytes of the residual an element.
    #[must_use]
    pub const fn residual_size(self, precision: Precision) -> u64 {
        match (precision, self.master) {
            (Precision::Fp32, _) => 0,
            (Precision::Bf16, Master::Bits32) => 2,
            (Precision::Bf16, Master::Bits24) => 1,
        }
    }

    /// The dtype of the residual.
    #[must_use]
    pub const fn residual_dtype(self) -> Dtype {
        match self.master {
            Master::Bits32 => Dtype::I16,
            Master::Bits24 => Dtype::I8,
        }
    }

    /// Bytes that AdamW moves for an element, gradient included: 26 with everything in fp32 over bf16 weights.
    #[must_use]
    pub fn update_bytes(self, precision: Precision) -> f64 {
        let weight = precision.dtype().size();
        let state = 2 * (weight + self.residual_size(precision)) + weight;
        4.0 * self.moments.bytes(TENSOR_ALIGN) as f64 / TENSOR_ALIGN as f64 + state as f64
    }
}

/// What a tensor is to the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Has a master, moments and a gradient.
    Trainable,
    /// A frozen parameter or a buffer: kept exactly in its own dtype, never updated.
    Frozen,
}

/// One tensor as the model declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Its full Hugging Face name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// For a frozen tensor its own dtype; ignored for a trainable one, whose dtype is the precision's.
    pub dtype: Dtype,
    /// Trainable or frozen.
    pub role: Role,
    /// Index of its parameter group (trainable only).
    #[serde(default)]
    pub group: u32,
    /// Where the tensor of that name is spread over several units: which of its elements is this one's first.
    #[serde(default)]
    pub begin: u64,
}

impl TensorSpec {
    /// A trainable tensor of the first parameter group. (`dtype` says nothing: its dtype is the precision's.)
    #[must_use]
    pub fn trainable(name: impl Into<String>, shape: impl Into<Vec<u64>>) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype: Dtype::F32, role: Role::Trainable, group: 0, begin: 0 }
    }

    /// A frozen tensor or a buffer, kept in its own dtype.
    #[must_use]
    pub fn frozen(name: impl Into<String>, shape: impl Into<Vec<u64>>, dtype: Dtype) -> Self {
        Self { name: name.into(), shape: shape.into(), dtype, role: Role::Frozen, group: 0, begin: 0 }
    }

    /// The same in another parameter group.
    #[must_use]
    pub fn in_group(self, group: u32) -> Self {
        Self { group, ..self }
    }

    /// Number of elements; 1 for a scalar.
    #[must_use]
    pub fn numel(&self) -> u64 {
        // What is too large is refused when it is laid out.
        self.shape.iter().fold(1, |numel: u64, &dim| numel.saturating_mul(dim))
    }
}

/// The offsets of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorLayout {
    /// What the model declared.
    pub spec: TensorSpec,
    /// Trainable: its first element in the trainable plane (also in residual, moments and gradient). Frozen: 0.
    pub element: u64,
    /// Its first byte in the unit's image.
    pub byte: u64,
}

/// The layout of one unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct UnitLayout {
    /// The unit's name, such as `layers.3`.
    pub name: String,
    /// Its tensors, in model order.
    pub tensors: Vec<TensorLayout>,
    /// Elements of the trainable plane, padding included.
    pub elements: u64,
    /// Bytes of the image, padded to 4 KiB.
    pub image_bytes: u64,
    /// How the trainable plane is stored.
    pub precision: Precision,
    /// How residual and moments are stored.
    #[serde(default)]
    pub state: StateFormat,
}

impl UnitLayout {
    /// Lays out a unit's tensors.
    ///
    /// # Errors
    /// [`Error`] when two tensors share a name, or the unit has more than 2^59 elements.
    ///
    /// ```
    /// use megatrain_core::layout::{Dtype, Precision, TensorSpec, UnitLayout};
    ///
    /// let tensors = vec![
    ///     TensorSpec::trainable("proj.weight", [48, 16]),
    ///     TensorSpec::frozen("norm.weight", [16], Dtype::F32),
    /// ];
    /// let unit = UnitLayout::new("layers.0", tensors, Precision::Bf16)?;
    /// assert_eq!(unit.num_trainable(), 48 * 16);
    /// assert_eq!((unit.tensors[0].byte, unit.tensors[1].byte), (0, 2 * unit.elements)); // frozen after trainable
    /// assert_eq!(unit.moment_bytes(), 4 * unit.elements);
    /// # Ok::<(), megatrain_core::Error>(())
    /// ```
    pub fn new(name: impl Into<String>, specs: Vec<TensorSpec>, precision: Precision) -> Result<Self> {
        let name = name.into();
        let mut seen = std::collections::HashSet::new();
        let mut total = 0u64;
        for spec in &specs {
            if !seen.insert(spec.name.as_str()) {
                return Err(Error::DuplicateTensor { unit: name, tensor: spec.name.clone() });
            }
            let numel = spec.shape.iter().try_fold(1u64, |a, &d| a.checked_mul(d)).filter(|&n| n <= MOST_ELEMENTS);
            total = numel.map_or(u64::MAX, |n| total.saturating_add(n.next_multiple_of(UNIT_ALIGN)));
            if total > MOST_ELEMENTS {
                let (tensor, shape) = (spec.name.clone(), spec.shape.clone());
                return Err(Error::UnitTooLarge { unit: name, tensor, shape, log2: MOST_ELEMENTS.ilog2() });
            }
        }
        let mut element = 0u64;
        let mut tensors: Vec<TensorLayout> =
            specs.into_iter().map(|spec| TensorLayout { spec, element: 0, byte: 0 }).collect();
        for tensor in tensors.iter_mut().filter(|t| t.spec.role == Role::Trainable) {
            tensor.element = element;
            tensor.byte = element * precision.dtype().size();
            element = (element + tensor.spec.numel()).next_multiple_of(TENSOR_ALIGN);
        }
        let elements = element.next_multiple_of(UNIT_ALIGN);
        let mut byte = elements * precision.dtype().size();
        for tensor in tensors.iter_mut().filter(|t| t.spec.role == Role::Frozen) {
            tensor.byte = byte;
            byte = (byte + tensor.spec.numel() * tensor.spec.dtype.size()).next_multiple_of(256);
        }
        let (image_bytes, state) = (byte.next_multiple_of(4096), StateFormat::default());
        Ok(Self { name, tensors, elements, image_bytes, precision, state })
    }

    /// The same with its state stored otherwise.
    #[must_use]
    pub fn with_state(self, state: StateFormat) -> Self {
        Self { state, ..self }
    }

    /// Trainable parameters, padding excluded.
    #[must_use]
    pub fn num_trainable(&self) -> u64 {
        self.trainable().map(|t| t.spec.numel()).sum()
    }

    /// The trainable tensors, in model order.
    pub fn trainable(&self) -> impl Iterator<Item = &TensorLayout> {
        self.tensors.iter().filter(|t| t.spec.role == Role::Trainable)
    }

    /// Bytes of the residual plane: 2 an element under [`Precision::Bf16`] (1 of a 24-bit master), none under
    /// [`Precision::Fp32`].
    #[must_use]
    pub fn residual_bytes(&self) -> u64 {
        self.elements * self.residual_size()
    }

    /// Bytes of the residual an element.
    #[must_use]
    pub const fn residual_size(&self) -> u64 {
        self.state.residual_size(self.precision)
    }

    /// Bytes that AdamW moves an element, gradient included.
    #[must_use]
    pub fn update_bytes(&self) -> f64 {
        self.state.update_bytes(self.precision)
    }

    /// Bytes of one moment plane.
    #[must_use]
    pub fn moment_bytes(&self) -> u64 {
        self.state.moments.bytes(self.elements)
    }

    /// Bytes of a plane of fp32 sums of gradients.
    #[must_use]
    pub fn sum_bytes(&self) -> u64 {
        self.elements * 4
    }

    /// How many blocks [`UnitLayout::norm_blocks`] lists.
    #[must_use]
    pub fn num_norm_blocks(&self) -> u64 {
        self.trainable().map(|t| t.spec.numel().div_ceil(NORM_BLOCK)).sum()
    }

    /// The first element of one of these blocks; the end of the plane after the last one.
    #[must_use]
    pub(crate) fn norm_block_start(&self, mut block: u64) -> u64 {
        for tensor in self.trainable() {
            let blocks = tensor.spec.numel().div_ceil(NORM_BLOCK);
            if block < blocks {
                return tensor.element + block * NORM_BLOCK;
            }
            block -= blocks;
        }
        self.elements
    }

    /// The blocks over which the gradient norm is summed: `(first element, length)`, in parameter order.
    #[must_use]
    pub fn norm_blocks(&self) -> Vec<(u64, u64)> {
        let mut blocks = Vec::new();
        for tensor in self.trainable() {
            let numel = tensor.spec.numel();
            let mut start = 0;
            while start < numel {
                let len = NORM_BLOCK.min(numel - start);
                blocks.push((tensor.element + start, len));
                start += len;
            }
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(name: String, shape: Vec<u64>, dtype: Dtype, role: Role) -> TensorSpec {
        TensorSpec { name, shape, dtype, role, group: 0, begin: 0 }
    }

    proptest! {
        #[test]
        fn tensors_are_aligned_in_order_and_never_overlap(
            tensors in prop::collection::vec((prop::collection::vec(0u64..40, 0..4), any::<bool>(), 0usize..5), 0..12),
            full in any::<bool>(),
            moments in prop::sample::select(vec![Moments::Fp32, Moments::Bf16, Moments::Bits8]),
            master in prop::sample::select(vec![Master::Bits32, Master::Bits24]),
        ) {
            let precision = if full { Precision::Fp32 } else { Precision::Bf16 };
            let dtypes = [Dtype::Bf16, Dtype::F16, Dtype::F32, Dtype::I64, Dtype::Bool];
            let specs = tensors.into_iter().enumerate().map(|(i, (shape, trainable, dtype))| {
                let role = if trainable { Role::Trainable } else { Role::Frozen };
                spec(format!("t{i}"), shape, dtypes[dtype], role)
            });
            let layout = UnitLayout::new("u", specs.collect(), precision).unwrap();
            let layout = layout.with_state(StateFormat { moments, master });
            let size = precision.dtype().size();
            let mut ranges: Vec<(u64, u64)> = Vec::new();
            for tensor in &layout.tensors {
                prop_assert!(tensor.byte.is_multiple_of(256));
                let bytes = match tensor.spec.role {
                    Role::Trainable => {
                        prop_assert_eq!(tensor.byte, tensor.element * size);
                        prop_assert!(tensor.element + tensor.spec.numel() <= layout.elements);
                        tensor.spec.numel() * size
                    }
                    Role::Frozen => {
                        prop_assert!(tensor.byte >= layout.elements * size);
                        tensor.spec.numel() * tensor.spec.dtype.size()
                    }
                };
                ranges.push((tensor.byte, tensor.byte + bytes));
            }
            ranges.retain(|range| range.0 < range.1);
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            prop_assert!(ranges.last().is_none_or(|range| range.1 <= layout.image_bytes));
            prop_assert!(layout.image_bytes.is_multiple_of(4096));
            let state = 2 * layout.moment_bytes() + layout.residual_bytes();
            let expected = match (moments, full, master) {
                (Moments::Fp32, true, _) => 8.0,
                (Moments::Fp32, false, Master::Bits32) => 10.0,
                (Moments::Fp32, false, Master::Bits24) => 9.0,
                (Moments::Bf16, true, _) => 4.0,
                (Moments::Bf16, false, Master::Bits32) => 6.0,
                (Moments::Bf16, false, Master::Bits24) => 5.0,
                (Moments::Bits8, true, _) => 2.0625,
                (Moments::Bits8, false, Master::Bits32) => 4.0625,
                (Moments::Bits8, false, Master::Bits24) => 3.0625,
            };
            prop_assert_eq!(state as f64, expected * layout.elements as f64);
            let in_blocks: u64 = layout.norm_blocks().iter().map(|block| block.1).sum();
            prop_assert_eq!(in_blocks, layout.num_trainable());
            let starts: Vec<u64> = (0..layout.num_norm_blocks()).map(|block| layout.norm_block_start(block)).collect();
            prop_assert_eq!(starts, layout.norm_blocks().iter().map(|block| block.0).collect::<Vec<_>>());
            prop_assert_eq!(layout.norm_block_start(layout.num_norm_blocks()), layout.elements);
        }
    }

    #[test]
    fn norm_blocks_are_those_of_each_parameter_whatever_unit_it_is_in() {
        let specs = |names: &[&str]| -> Vec<TensorSpec> {
            names.iter().map(|n| spec((*n).into(), vec![NORM_BLOCK * 2 + 10], Dtype::F32, Role::Trainable)).collect()
        };
        let lengths = |layout: &UnitLayout| -> Vec<u64> { layout.norm_blocks().iter().map(|b| b.1).collect() };
        let together = UnitLayout::new("u", specs(&["a", "b"]), Precision::Bf16).unwrap();
        let apart = ["a", "b"].map(|n| UnitLayout::new(n, specs(&[n]), Precision::Bf16).unwrap());
        assert_eq!(lengths(&together), [lengths(&apart[0]), lengths(&apart[1])].concat());
        assert_eq!(lengths(&apart[0]), [NORM_BLOCK, NORM_BLOCK, 10]);
    }

    #[test]
    fn doubled_names_and_impossible_sizes_are_refused() {
        let twice = vec![spec("w".into(), vec![2], Dtype::F32, Role::Trainable); 2];
        let error = UnitLayout::new("u", twice, Precision::Bf16).unwrap_err().to_string();
        assert!(error.contains("declares the tensor w twice"), "{error}");
        let huge = |n: usize, shape: Vec<u64>| -> Vec<TensorSpec> {
            (0..n).map(|i| spec(format!("w{i}"), shape.clone(), Dtype::F32, Role::Frozen)).collect()
        };
        assert!(UnitLayout::new("u", huge(1, vec![u64::MAX, 2]), Precision::Fp32).is_err());
        assert!(UnitLayout::new("u", huge(1, vec![u64::MAX]), Precision::Fp32).is_err());
        assert!(UnitLayout::new("u", huge(40, vec![1 << 58]), Precision::Fp32).is_err());
        assert!(UnitLayout::new("u", huge(1, vec![1 << 58]), Precision::Fp32).is_ok());
    }
}
