//! The types of tensors that are read, as ggml numbers and names them.

use super::cursor::Checked;

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    F32,
    F16,
    Bf16,
    /// Blocks of 32: a float16 factor and integers of eight, five and four bits.
    Q8_0,
    Q5_0,
    Q4_0,
    /// Blocks of 256 in eight or sixteen groups that have small integers for factors.
    Q4K,
    Q5K,
    Q6K,
}

/// Names of ggml's other types by number, for the error that refuses them.
const OTHERS: [(u32, &str); 25] = [
    (3, "Q4_1"),
    (7, "Q5_1"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
];

impl Type {
    const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q5_0,
        Self::Q4_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    const fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 30,
            Self::Q8_0 => 8,
            Self::Q5_0 => 6,
            Self::Q4_0 => 2,
            Self::Q4K => 12,
            Self::Q5K => 13,
            Self::Q6K => 14,
        }
    }

    /// ggml's name.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q5_0 => "Q5_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// The names of all that are read.
    pub(super) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// The type with ggml's `number`; otherwise its name, if it has one.
    pub(super) fn numbered(number: u32) -> std::result::Result<Self, Option<&'static str>> {
        let found = Self::ALL.into_iter().find(|kind| kind.number() == number);
        found.ok_or_else(|| OTHERS.iter().find(|other| other.0 == number).map(|other| other.1))
    }

    /// Values of a block, and its bytes.
    pub(crate) const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4K => (256, 2 + 2 + 12 + 128),
            Self::Q5K => (256, 2 + 2 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
        }
    }

    /// Whether values share factors.
    pub(crate) const fn is_quantized(self) -> bool {
        self.block().0 > 1
    }

    /// Bytes of a tensor of `shape`.
    pub(super) fn bytes(self, shape: &[usize]) -> Checked<usize> {
        let (values, bytes) = self.block();
        let columns = shape.last().copied().unwrap_or(0);
        if !columns.is_multiple_of(values) {
            return Err(format!(
                "expected rows of a multiple of {values} values for type {}, found {columns}",
                self.name()
            ));
        }
        shape
            .iter()
            .try_fold(1_usize, |product, &size| product.checked_mul(size))
            .and_then(|count| (count / values).checked_mul(bytes))
            .ok_or_else(|| format!("expected a tensor that fits the file, found shape {shape:?}"))
    }
}
