//! Keys and values of past positions, with a slot for each sequence.
//!
//! Two layouts hold the same entries. [`Chronological`] keeps rows in the order of positions and grows
//! its views, so that attention sees exactly the tensors transformers shows it. [`Ring`] has static
//! shapes and finds its rows from a tensor of positions, for devices that compile. Model code asks for a
//! [`StepPlan`], hands in each layer's new keys and values and gets back those to attend to.

mod chronological;
mod ring;

pub(crate) use chronological::Chronological;
pub(crate) use ring::{Ring, RingStep};

use crate::{
    aten::Tensor,
    config::{Config, KeyValues, LayerType},
    error::{Error, Result},
};

/// How attention is computed over what the cache gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attend {
    /// ATen's fused operation, called as transformers calls it.
    Fused,
    /// Products and softmax written out.
    Written,
}

/// Which tokens of a step get logits.
pub(crate) enum Keep {
    /// All T.
    All,
    /// The last of T.
    Last,
    /// Some of T for each slot, by an index tensor `[B, kept]`: padding may follow them.
    At(Tensor),
}

impl Keep {
    /// Of `x`, the kept entries of dimension `dim`, which counts tokens.
    pub(crate) fn of(&self, x: &Tensor, dim: i64) -> Result<Tensor> {
        match self {
            Self::All => x.alias(),
            Self::Last => {
                let tokens = x.sizes()?[dim as usize];
                x.narrow(dim, tokens - 1, 1)
            }
            Self::At(index) => {
                let sizes = x.sizes()?;
                let kept = index.sizes()?;
                let mut shape = vec![1; sizes.len()];
                shape[0] = kept[0];
                shape[dim as usize] = kept[1];
                // A table shared by all slots is repeated, since each slot keeps its own token.
                let mut batched = sizes.clone();
                batched[0] = shape[0];
                x.expand(&batched)?.take_along_dim(&index.reshape(&shape)?, dim)
            }
        }
    }
}

/// Where the new rows of one layer type go in this step.
#[derive(Clone)]
pub(crate) enum Rows {
    /// Rows of one slot's buffer, in order of positions.
    Chronological {
        /// The slot.
        slot: i64,
        /// Where rows go and which are seen.
        placement: chronological::Placement,
    },
    /// What to read and write of every slot's rows.
    Ring(std::rc::Rc<ring::RingRows>),
}

/// What the layers of one type do in this step.
pub(crate) struct TypePlan {
    pub(crate) attend: Attend,
    /// True where a key is seen, `[1 or B, 1, T, S]`; `None` means plain causal attention.
    pub(crate) mask: Option<Tensor>,
    rows: Rows,
}

/// One step's plan by [`LayerType::index`]; `None` for a type no layer has.
pub(crate) struct StepPlan {
    pub(crate) types: [Option<TypePlan>; 2],
}

impl StepPlan {
    /// The same plan for only the kept tokens as queries; keys stay all of them.
    pub(crate) fn keep(&self, keep: &Keep) -> Result<Self> {
        let one = |plan: &Option<TypePlan>| match plan {
            None => Ok(None),
            Some(plan) => {
                let mask = plan.mask.as_ref().map(|mask| keep.of(mask, 2)).transpose()?;
                Ok(Some(TypePlan { attend: plan.attend, mask, rows: plan.rows.clone() }))
            }
        };
        Ok(Self { types: [one(&self.types[0])?, one(&self.types[1])?] })
    }
}

/// The buffers of the layers that own keys and values.
pub(crate) struct Buffers {
    /// By layer: keys and values `[slots, kv_heads, rows, head_dim]`; `None` for layers that share.
    layers: Vec<Option<(Tensor, Tensor)>>,
    bytes: u64,
}

impl Buffers {
    /// `rows` by [`LayerType::index`]; element type and device are `like`'s.
    fn new(config: &Config, slots: usize, rows: [usize; 2], like: &Tensor) -> Result<Self> {
        let dtype = like.dtype()?;
        let mut bytes = 0;
        let layers = config
            .layers
            .iter()
            .map(|layer| match layer.key_values {
                KeyValues::Shared { .. } => Ok(None),
                KeyValues::Own { .. } => {
                    let shape = [
                        slots,
                        layer.num_key_value_heads,
                        rows[layer.layer_type.index()],
                        layer.head_dim,
                    ];
                    bytes += 2 * shape.iter().product::<usize>() as u64 * dtype.bytes() as u64;
                    let shape = shape.map(|size| size as i64);
                    let k = Tensor::zeros(&shape, dtype, like)?;
                    let v = Tensor::zeros(&shape, dtype, like)?;
                    Ok(Some((k, v)))
                }
            })
            .collect::<Result<_>>()?;
        Ok(Self { layers, bytes })
    }

    /// Every tensor, layer by layer.
    fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        for (keys, values) in self.layers.iter_mut().flatten() {
            all.extend([keys, values]);
        }
    }

    fn of(&self, layer_idx: usize) -> Result<&(Tensor, Tensor)> {
        self.layers[layer_idx]
            .as_ref()
            .ok_or_else(|| Error::Internal(format!("layer {layer_idx} owns no cache")))
    }
}

/// Either layout.
pub(crate) enum Cache {
    /// Rows in order of positions; exact.
    Chronological(Chronological),
    /// Static shapes.
    Ring(Ring),
}

impl Cache {
    /// Stores `k` and `v` `[B, kv_heads, T, head_dim]` of layer `layer_idx` and gives the keys and values
    /// its queries see, `[B, kv_heads, S, head_dim]`.
    pub(crate) fn update(
        &mut self,
        layer_idx: usize,
        k: &Tensor,
        v: &Tensor,
        plan: &TypePlan,
    ) -> Result<(Tensor, Tensor)> {
        match (self, &plan.rows) {
            (Self::Chronological(cache), Rows::Chronological { slot, placement }) => {
                cache.update(layer_idx, (k, v), *slot, placement)
            }
            (Self::Ring(cache), Rows::Ring(rows)) => cache.update(layer_idx, (k, v), rows),
            _ => Err(Error::Internal("a plan of the other cache layout".into())),
        }
    }

    /// Every tensor of the cache, in a fixed order.
    pub(crate) fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut all = Vec::new();
        match self {
            Self::Chronological(cache) => cache.buffers.tensors_mut(&mut all),
            Self::Ring(cache) => cache.buffers.tensors_mut(&mut all),
        }
        all
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Chronological(cache) => cache.buffers.bytes,
            Self::Ring(cache) => cache.buffers.bytes,
        }
    }
}

/// Layer types that occur in `config`, in index order.
fn types_of(config: &Config) -> [bool; 2] {
    LayerType::ALL.map(|t| config.layers.iter().any(|layer| layer.layer_type == t))
}
