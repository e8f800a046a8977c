//! How fast mode keeps a weight, by what its file says of it: for who loads it, and for who asks how much memory it will take.
//!
//! Decided by type and shape alone. Only a factor that is no finite number, which the headers do not tell, makes it bfloat16 still.

use std::collections::HashMap;

use crate::{
    checkpoint::Place,
    config::Scheme,
    gguf::{Type, hugging_face_name},
    kernels::{GROUP_SIZE, MatrixForm},
};

/// The form in which a matrix of `columns` columns is multiplied that a GGUF file has in the type `kind`.
pub(super) fn form_of_type(kind: Type, columns: usize) -> MatrixForm {
    let form = match kind {
        Type::Q4_0 => MatrixForm::W4,
        // Five bits too: the integers are the same in eight.
        Type::Q8_0 | Type::Q5_0 => MatrixForm::W8,
        Type::Q4K => MatrixForm::Q4K,
        Type::Q5K => MatrixForm::Q5K,
        Type::Q6K => MatrixForm::Q6K,
        Type::F32 | Type::F16 | Type::Bf16 => MatrixForm::Bf16,
    };
    form.or_bf16(columns)
}

/// The same of one that is packed by `scheme`.
pub(crate) fn form_of_scheme(scheme: Scheme, columns: usize) -> MatrixForm {
    match scheme.num_bits {
        4 if scheme.has_groups_of(GROUP_SIZE) => MatrixForm::W4.or_bf16(columns),
        8 if scheme.has_groups_of(GROUP_SIZE) => MatrixForm::W8.or_bf16(columns),
        _ => MatrixForm::Bf16,
    }
}

/// A tensor of a GGUF file, by its header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored {
    kind: Type,
    /// In the file.
    bytes: usize,
}

impl Stored {
    /// The tensors of the GGUF models among `places`, each from the first that has it, by Hugging Face's names.
    pub(crate) fn by_name(places: &[Place]) -> HashMap<String, Self> {
        let mut all = HashMap::new();
        let files = places.iter().filter_map(|place| place.gguf.as_ref()).flat_map(|g| &g.files);
        for tensor in files.flat_map(|file| &file.tensors) {
            if let Some(name) = hugging_face_name(&tensor.name) {
                all.entry(name).or_insert(Self { kind: tensor.kind, bytes: tensor.range.len() });
            }
        }
        all
    }

    /// The form in which it is multiplied as a matrix of `columns` columns.
    pub(crate) fn form(self, columns: usize) -> MatrixForm {
        form_of_type(self.kind, columns)
    }

    /// Bytes of a table that stays in its file; `None` for one that is kept in bfloat16.
    pub(crate) fn table_bytes(self) -> Option<usize> {
        self.kind.is_quantized().then_some(self.bytes)
    }
}
