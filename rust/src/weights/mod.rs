//! Safetensors files of one or more folders, and GGUF files → named tensors on the device.
//!
//! Headers are checked against the file before anything is allocated; tensors are views of the mapped file, copied only
//! where the device or the element type asks for it, or unpacked where they are stored packed. Names are those of a text-only
//! checkpoint (`model.layers.0…`), whichever of the two naming forms the files use. Which tensors a
//! model needs is the model's business.

mod experts;
mod files;
mod form;
mod gguf;
mod host;
mod kept;
mod packed;
mod words;

pub(crate) use experts::Stack;
pub(crate) use form::{Arithmetic, Form};
pub(crate) use host::Table;
pub(crate) use kept::{Stored, form_of_scheme};

use std::{
    cell::OnceCell,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use files::{INDEX_FILE, safetensors_files};
use form::{PART_BYTES, bytes, quantize, split};
use gguf::Blocks;
use safetensors::{Dtype, SafeTensors};

use crate::{
    aten::{DType, MappedFile, Tensor, num_threads},
    checkpoint::Place,
    config::Scheme,
    error::{Error, Result},
    kernels::Kernels,
};

/// Towers of multimodal checkpoints that the text path does not load (gemma4.md 3.2).
const OTHER_TOWERS: [&str; 7] = [
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "audio_embedder.",
    "multi_modal_projector.",
];

/// A file of the checkpoint.
struct Shard {
    path: PathBuf,
    map: Arc<MappedFile>,
    /// Byte at which the tensors begin.
    data_start: usize,
}

/// Where one tensor lies.
struct Entry {
    shard: usize,
    /// Its name in the file.
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    range: std::ops::Range<usize>,
    /// How a GGUF file's bytes become values, where they are none.
    blocks: Option<Blocks>,
}

/// Bytes of a file.
struct Region {
    map: Arc<MappedFile>,
    range: std::ops::Range<usize>,
}

impl Region {
    fn bytes(&self) -> &[u8] {
        &self.map.bytes()[self.range.clone()]
    }
}

/// What weights take up.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sizes {
    /// Bytes as they are kept and multiplied.
    pub(crate) kept: u64,
    /// Bytes in the files, by the files' names of types.
    pub(crate) stored: BTreeMap<String, u64>,
}

/// All tensors of a checkpoint, and where each is to go.
pub(crate) struct Weights {
    /// The paths they are from, for errors.
    paths: String,
    shards: Vec<Shard>,
    entries: HashMap<String, Entry>,
    /// A one-element tensor of the device and element type weights are moved to.
    like: Tensor,
    form: Form,
    /// How weights may be packed.
    schemes: Vec<Scheme>,
    taken: BTreeSet<String>,
    bytes: u64,
    /// Unpacks weights; unless they are given, its threads begin with the first packed weight.
    kernels: OnceCell<Arc<Kernels>>,
    /// Fewest of a value that is multiplied as it is stored.
    bits: usize,
}

impl Weights {
    /// Every safetensors file of the folders and the GGUF models among `places`; a weight found in several is taken from the first.
    ///
    /// # Errors
    /// `Io`, `Format` or `Input` naming the file or folder.
    pub(crate) fn open(places: &[Place], like: Tensor, form: Form) -> Result<Self> {
        let mut weights = Self {
            paths: Place::names(places),
            shards: Vec::new(),
            entries: HashMap::new(),
            like,
            form,
            schemes: Vec::new(),
            taken: BTreeSet::new(),
            bytes: 0,
            kernels: OnceCell::new(),
            bits: 16,
        };
        for place in places {
            let mut found = match &place.gguf {
                Some(gguf) => weights.add_gguf(gguf)?,
                None => weights.add_folder(&place.path)?,
            };
            // A weight comes from one folder whole, packed or not.
            let there: HashSet<_> =
                weights.entries.keys().map(|name| whole(name).to_owned()).collect();
            found.retain(|name, _| !there.contains(whole(name)));
            weights.entries.extend(found);
        }
        if weights.entries.is_empty() && !form.shapes_only {
            return Err(Error::Input(format!(
                "expected *.safetensors files or a GGUF model, found none in {}",
                weights.paths
            )));
        }
        Ok(weights)
    }

    /// Opens every safetensors file of `folder`.
    fn add_folder(&mut self, folder: &Path) -> Result<HashMap<String, Entry>> {
        let mut found = HashMap::new();
        for (file, names) in safetensors_files(folder)? {
            let shard = self.shards.len();
            let entries = self.add_shard(&folder.join(&file))?;
            if let Some(missing) = names.iter().find(|name| !entries.contains_key(*name)) {
                return Err(Error::Format {
                    file: folder.join(INDEX_FILE),
                    reason: format!("`{missing}` should be in {file}, but is not"),
                });
            }
            for (name, info) in entries {
                let text_name = text_only_name(&name);
                let entry = Entry { shard, name, ..info };
                if let Some(twin) = found.insert(text_name, entry) {
                    return Err(self.wrong(&twin, "it is in this folder twice".into()));
                }
            }
        }
        Ok(found)
    }

    /// Maps one file and checks its header: sizes, offsets, overlaps, element types.
    fn add_shard(&mut self, path: &Path) -> Result<HashMap<String, Entry>> {
        let format = |reason: String| Error::Format { file: path.to_owned(), reason };
        // Opening a named pipe would wait for a writer.
        if path.exists() && !path.is_file() {
            return Err(format("expected a file, found something else".into()));
        }
        let map = MappedFile::open(path)?;
        let (header, metadata) = SafeTensors::read_metadata(map.bytes())
            .map_err(|error| format(format!("expected a safetensors file: {error}")))?;
        let data_start = header + 8;
        let data_bytes = map.bytes().len() - data_start;
        if metadata.data_len() != data_bytes {
            return Err(format(format!(
                "the header describes {} bytes of tensors, but {data_bytes} follow it (is the file \
                 cut short?)",
                metadata.data_len()
            )));
        }
        let entries = metadata
            .tensors()
            .into_iter()
            .map(|(name, info)| {
                let entry = Entry {
                    shard: self.shards.len(),
                    name: String::new(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    range: info.data_offsets.0..info.data_offsets.1,
                    blocks: None,
                };
                (name, entry)
            })
            .collect();
        self.shards.push(Shard { path: path.to_owned(), map, data_start });
        Ok(entries)
    }

    /// Packed weights may be packed in these ways.
    pub(crate) fn packed_by(self, schemes: &[Scheme]) -> Self {
        Self { schemes: schemes.to_vec(), ..self }
    }

    /// Whether the weight `name` is in the checkpoint, packed or not.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name) || self.is_packed(name)
    }

    /// The tensor `name` with exactly `shape`, in the model's element type on the model's device.
    ///
    /// # Errors
    /// `MissingTensor`; `Tensor` when shape or element type is wrong; `Aten` when the device refuses it.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = self.read(name, shape)?.type_as(&self.like)?;
        self.bytes += bytes(&tensor)?;
        Ok(tensor)
    }

    /// A projection `[out, in]` in the wanted form: its weight in one or more parts of the outputs, and
    /// factors `[out]` where it is int8.
    ///
    /// # Errors
    /// As [`Weights::take`].
    pub(crate) fn take_matrix(
        &mut self,
        name: &str,
        shape: [usize; 2],
    ) -> Result<(Vec<Tensor>, Option<Tensor>)> {
        if self.form.arithmetic != Arithmetic::Compiled {
            return Ok((vec![self.take(name, &shape)?], None));
        }
        // On the host, so that the device never holds two forms of a weight.
        let weight = self.read(name, &shape)?.to_dtype(self.like.dtype()?)?;
        let (weight, scale) = if self.form.int8 {
            let (weight, scale) = quantize(&weight)?;
            (weight, Some(scale.reshape(&[shape[0] as i64])?.to_device_of(&self.like)?))
        } else {
            (weight, None)
        };
        let mut parts = Vec::new();
        for part in split(&weight.transpose(0, 1)?, PART_BYTES)? {
            let part = part.contiguous()?.to_device_of(&self.like)?;
            self.bytes += bytes(&part)?;
            parts.push(part);
        }
        self.bytes += scale.as_ref().map_or(Ok(0), bytes)?;
        Ok((parts, scale))
    }

    fn kernels(&self) -> Result<Arc<Kernels>> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(Arc::clone(kernels));
        }
        // As many threads as PyTorch's operations have.
        let kernels = Kernels::new(usize::try_from(num_threads()?).unwrap_or(1), None)?;
        Ok(Arc::clone(self.kernels.get_or_init(|| Arc::new(kernels))))
    }

    /// Fewest bits of a value that is multiplied as it is stored; 16 where none has less.
    pub(crate) fn bits(&self) -> usize {
        self.bits
    }

    /// In which operations the model is to compute.
    pub(crate) fn arithmetic(&self) -> Arithmetic {
        self.form.arithmetic
    }

    /// The tensor `name` of exactly `shape` as the file has it; zeros where only shapes are wanted.
    fn read(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        if self.form.shapes_only && self.entries.is_empty() {
            return Tensor::zeros(&sizes, self.like.dtype()?, &self.like);
        }
        if let Some(stored) = self.in_blocks(name, shape)? {
            return self.values_of(name, shape, &stored);
        }
        let Some((region, dtype)) = self.find(name, shape)? else {
            return match shape {
                &[rows, columns] if self.is_packed(name) => self.unpack(name, [rows, columns]),
                _ => Err(self.missing(name)),
            };
        };
        if self.form.shapes_only {
            return Tensor::zeros(&sizes, self.like.dtype()?, &self.like);
        }
        region.map.tensor(region.range.clone(), &sizes, dtype)
    }

    /// Where the tensor `name` of exactly `shape` lies, which counts as taken; `None` when it is nowhere, or packed.
    fn find(&mut self, name: &str, shape: &[usize]) -> Result<Option<(Region, DType)>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        self.check_entry(entry, shape)?;
        let Some(dtype) = model_dtype(entry.dtype) else {
            let reason = format!("expected BF16, F16 or F32, found {:?}", entry.dtype);
            return Err(self.wrong(entry, reason));
        };
        let region = self.region_of(entry);
        self.taken.insert(name.to_owned());
        Ok(Some((region, dtype)))
    }

    fn check_entry(&self, entry: &Entry, shape: &[usize]) -> Result<()> {
        if entry.shape == shape {
            return Ok(());
        }
        let found = brief(&entry.shape);
        let reason = format!("expected shape {shape:?} by the model's config, found {found}");
        Err(self.wrong(entry, reason))
    }

    fn region_of(&self, entry: &Entry) -> Region {
        let map = Arc::clone(&self.shards[entry.shard].map);
        Region { map, range: self.range_of(entry) }
    }

    /// Where `entry` lies in its shard's map.
    fn range_of(&self, entry: &Entry) -> std::ops::Range<usize> {
        let start = self.shards[entry.shard].data_start;
        start + entry.range.start..start + entry.range.end
    }

    /// Bytes of the tensors taken so far.
    pub(crate) fn sizes(&self) -> Sizes {
        let mut stored = BTreeMap::new();
        for entry in self.taken.iter().filter_map(|name| self.entries.get(name)) {
            let name = match entry.blocks {
                Some(blocks) => blocks.name().to_owned(),
                None => format!("{:?}", entry.dtype),
            };
            *stored.entry(name).or_insert(0) += entry.range.len() as u64;
        }
        Sizes { kept: self.bytes, stored }
    }

    /// The element type of the checkpoint: of its embeddings, or where these are packed of its last norm; bfloat16 for blocks.
    ///
    /// # Errors
    /// `MissingTensor`; `Tensor` when the type is none a model runs in.
    pub(crate) fn dtype(&self) -> Result<DType> {
        let embeddings = "model.embed_tokens.weight";
        let name = if self.is_packed(embeddings) { "model.norm.weight" } else { embeddings };
        let entry = self.entries.get(name).ok_or_else(|| self.missing(name))?;
        if entry.blocks.is_some() {
            return Ok(DType::Bf16);
        }
        model_dtype(entry.dtype).ok_or_else(|| {
            let reason = format!("expected BF16, F16 or F32, found {:?}", entry.dtype);
            self.wrong(entry, reason)
        })
    }

    /// Fails on a tensor that the model did not take and that may not be ignored.
    ///
    /// # Errors
    /// `Tensor` naming it, `Unsupported` when it is a part of a quantized weight that is not read.
    pub(crate) fn check_all_taken(&self, ignorable: impl Fn(&str) -> bool) -> Result<()> {
        let left: BTreeMap<_, _> = self
            .entries
            .iter()
            .filter(|(name, _)| !self.taken.contains(*name) && !is_other(name) && !ignorable(name))
            .collect();
        let Some((name, entry)) = left.into_iter().next() else { return Ok(()) };
        let dense = format!("{}.weight", owner(name));
        if name.ends_with(".weight_packed") && self.entries.contains_key(&dense) {
            return Err(self.wrong(entry, "this weight is here twice, packed and not".into()));
        }
        if name.contains(".weight_") {
            return Err(Error::Unsupported {
                file: self.shards[entry.shard].path.clone(),
                what: format!("a quantized weight (`{}`)", entry.name),
            });
        }
        Err(self.wrong(entry, "the model's config describes no place for it".into()))
    }

    fn missing(&self, name: &str) -> Error {
        Error::MissingTensor { name: name.to_owned(), folders: self.paths.clone() }
    }

    fn wrong(&self, entry: &Entry, reason: String) -> Error {
        let file = self.shards[entry.shard].path.clone();
        Error::Tensor { file, name: entry.name.clone(), reason }
    }
}

/// What comes from one folder whole: a weight, packed or not, or all experts of a layer, fused or split.
fn whole(name: &str) -> &str {
    const EXPERTS: &str = ".experts";
    match name.find(".experts.") {
        Some(at) => &name[..at + EXPERTS.len()],
        None => owner(name),
    }
}

/// The module that a weight belongs to, for the tensors of a packed one too; any other tensor is its own.
pub(crate) fn owner(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((module, last)) if last == "weight" || last.starts_with("weight_") => module,
        _ => name,
    }
}

/// A shape for an error's text; a hostile file may name one of a million sizes.
fn brief(shape: &[usize]) -> String {
    if shape.len() > 4 { format!("{} dimensions", shape.len()) } else { format!("{shape:?}") }
}

/// The tensor's name in a text-only checkpoint; that of the published Gemma 3 begins with `language_model.model.`, and its head's
/// with `language_model.lm_head.`.
fn text_only_name(name: &str) -> String {
    match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.strip_prefix("language_model.").unwrap_or(name).to_owned(),
    }
}

/// Tensors of towers that the text path leaves alone, and buffers that are computed from config.json.
fn is_other(name: &str) -> bool {
    let rest = name.strip_prefix("model.").unwrap_or(name);
    OTHER_TOWERS.iter().any(|tower| rest.starts_with(tower))
        || name.ends_with("inv_freq")
        || name.ends_with("embed_scale")
}

fn model_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        Dtype::F32 => Some(DType::F32),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tensors_of_a_packed_weight_have_one_owner() {
        for name in ["a.q_proj.weight", "a.q_proj.weight_packed", "a.q_proj.weight_scale"] {
            assert_eq!(owner(name), "a.q_proj");
        }
        assert_eq!(owner("model.layers.0.layer_scalar"), "model.layers.0.layer_scalar");
    }

    #[test]
    fn every_naming_form_leads_to_the_text_only_name() {
        assert_eq!(text_only_name("language_model.model.norm.weight"), "model.norm.weight");
        assert_eq!(text_only_name("language_model.lm_head.weight"), "lm_head.weight");
        assert_eq!(text_only_name("model.language_model.norm.weight"), "model.norm.weight");
        assert_eq!(text_only_name("model.norm.weight"), "model.norm.weight");
        assert_eq!(text_only_name("lm_head.weight"), "lm_head.weight");
    }
}
