//! A mixture of experts beside a layer's MLP (gemma4.md 2.5, 2.7): the router, the experts it chooses, and how both branches join.

use super::{linear::Linear, norm::RmsNorm};
use crate::{
    aten::{DType, Tensor},
    config::Config,
    error::Result,
    weights::{Arithmetic, Stack, Weights},
};

/// Most experts that a program takes one by one: each is two products of its own in every layer. Libtpu's estimate for
/// 26B-A4B on a v5e is 0.028 ms each, and 2.6 ms for all 128 in one product.
const MOST_ALONE: i64 = 32;

/// The experts of one layer, with the norms that their branch and the MLP's need beside each other.
pub(crate) struct Experts {
    router: Router,
    pre_feedforward_layernorm_2: RmsNorm,
    gate_up_proj: ExpertWeights, // [experts, 2 · width, hidden], gates first
    down_proj: ExpertWeights,    // [experts, hidden, width]
    post_feedforward_layernorm_1: RmsNorm,
    post_feedforward_layernorm_2: RmsNorm,
    /// Transformers' own calls; elsewhere shapes do not depend on the routes.
    groups: bool,
}

/// Which experts a token goes through.
struct Router {
    norm: RmsNorm,
    scale: Tensor, // [hidden]
    scalar_root_size: f64,
    proj: Linear,             // [experts, hidden]
    per_expert_scale: Tensor, // [experts]
    top_k: i64,
}

/// What the router chose for `N` tokens.
struct Routes {
    top_k_index: Tensor,   // [N, k], int64
    top_k_weights: Tensor, // [N, k], float32
}

/// One stacked weight.
struct ExpertWeights {
    /// `[experts, out, in]` as in the checkpoint where they are multiplied in groups; `[experts, in, out]` elsewhere.
    weight: Tensor,
    /// `[experts, 1, out]` where the weight is int8.
    scale: Option<Tensor>,
}

impl Experts {
    /// `prefix` ends in the layer's number and a point. `None` for models without experts.
    pub(crate) fn load(
        prefix: &str,
        config: &Config,
        weights: &mut Weights,
    ) -> Result<Option<Self>> {
        let Some(plan) = config.experts else { return Ok(None) };
        let (hidden, width) = (config.hidden_size, plan.moe_intermediate_size);
        let router = Router::load(prefix, config, plan.num_experts, plan.top_k_experts, weights)?;
        let exact = weights.arithmetic() == Arithmetic::Exact;
        // The simulated TPU multiplies no groups, and nobody compares a device's bits with transformers on a CPU.
        let groups = exact && is_eager(&router.scale.device()?);
        let mut take = |fused: &str, parts: &[&str], shape: [usize; 2]| {
            let stack = Stack { prefix, fused, parts, experts: plan.num_experts, shape };
            let (weight, scale) = weights.take_experts(&stack)?;
            let turned = if exact && !groups { weight.transpose(1, 2)? } else { weight };
            Ok(ExpertWeights { weight: turned, scale })
        };
        let gate_up_proj = take("gate_up_proj", &["gate_proj", "up_proj"], [width, hidden])?;
        let down_proj = take("down_proj", &["down_proj"], [hidden, width])?;
        let mut norm =
            |name: &str| RmsNorm::load(weights, &format!("{prefix}{name}.weight"), hidden, config);
        Ok(Some(Self {
            router,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2")?,
            gate_up_proj,
            down_proj,
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2")?,
            groups,
        }))
    }

    pub(crate) fn tensors_mut<'a>(&'a mut self, all: &mut Vec<&'a mut Tensor>) {
        self.router.norm.tensors_mut(all);
        self.router.proj.tensors_mut(all);
        all.extend([&mut self.router.scale, &mut self.router.per_expert_scale]);
        for weights in [&mut self.gate_up_proj, &mut self.down_proj] {
            all.push(&mut weights.weight);
            all.extend(&mut weights.scale);
        }
        self.pre_feedforward_layernorm_2.tensors_mut(all);
        self.post_feedforward_layernorm_1.tensors_mut(all);
        self.post_feedforward_layernorm_2.tensors_mut(all);
    }

    /// What the MLP made, `x`, and what the experts make of the residual stream `h` as the MLP found it, each normed, in
    /// sum: all `[B, T, hidden]`.
    pub(crate) fn beside(&self, x: &Tensor, h: &Tensor) -> Result<Tensor> {
        let sizes = h.sizes()?;
        let rows = h.reshape(&[-1, sizes[2]])?; // [N, hidden]
        let routes = self.router.forward(&rows)?;
        let rows = self.pre_feedforward_layernorm_2.forward(&rows)?;
        let made = if self.groups {
            self.grouped(&rows, &routes)?
        } else {
            self.compiled(&rows, &routes)?
        };
        let made = self.post_feedforward_layernorm_2.forward(&made.reshape(&sizes)?)?;
        self.post_feedforward_layernorm_1.forward(x)?.add(&made)
    }

    /// Transformers' own calls (5.24, `grouped_mm`, its default): a product for each expert with the tokens that go through
    /// it, weighted and summed in float32. `x` `[N, hidden]` → the same.
    fn grouped(&self, x: &Tensor, routes: &Routes) -> Result<Tensor> {
        let sizes = routes.top_k_index.sizes()?;
        let (tokens, top_k) = (sizes[0], sizes[1]);
        let (expert_ids, perm) = routes.top_k_index.reshape(&[-1])?.sort_last()?;
        let places = tokens * top_k;
        let experts = self.gate_up_proj.weight.sizes()?[0];
        // Of how many places the expert is at most this one: where its group ends.
        let ends = expert_ids
            .unsqueeze(0)?
            .le(&Tensor::arange(0, experts, x)?.unsqueeze(1)?)?
            .to_dtype(DType::I64)?
            .sum_dim(1, false)?;
        let x_grouped = x.index_select(0, &perm.floor_divide_scalar(top_k)?)?;
        let gate_up = x_grouped.grouped_mm(&self.gate_up_proj.weight.transpose(1, 2)?, &ends)?;
        let y = gate(&gate_up)?;
        let y = y.grouped_mm(&self.down_proj.weight.transpose(1, 2)?, &ends)?;
        let weights = routes.top_k_weights.reshape(&[-1])?.index_select(0, &perm)?;
        let y = y.mul(&weights.unsqueeze(1)?)?; // float32
        let hidden = x.sizes()?[1];
        Tensor::zeros(&[places, hidden], DType::F32, x)?
            .index_copy(0, &perm, &y)?
            .reshape(&[tokens, top_k, hidden])?
            .sum_dim(1, false)?
            .to_dtype(x.dtype()?)
    }

    /// The same with shapes that do not depend on the routes: few tokens go through their experts one by one, and many
    /// through every expert, where what the router did not choose has no weight.
    fn compiled(&self, x: &Tensor, routes: &Routes) -> Result<Tensor> {
        let sizes = routes.top_k_index.sizes()?;
        let (tokens, top_k, hidden) = (sizes[0], sizes[1], x.sizes()?[1]);
        let experts = self.gate_up_proj.weight.sizes()?[0];
        let (y, weights, over) = if tokens * top_k <= MOST_ALONE.min(experts - 1) {
            // XLA reads a slice inside the product. Of several experts gathered at once it makes a copy of all, which is
            // twice as slow as multiplying all.
            let chosen = routes.top_k_index.reshape(&[-1])?;
            let mut made = Vec::new();
            for place in 0..tokens * top_k {
                let expert = chosen.narrow(0, place, 1)?;
                let x = x.narrow(0, place / top_k, 1)?.unsqueeze(0)?;
                let y = gate(&self.gate_up_proj.at(&expert)?.multiply(&x)?)?;
                made.push(self.down_proj.at(&expert)?.multiply(&y)?); // [1, 1, hidden]
            }
            let y = Tensor::cat(&made.iter().collect::<Vec<_>>(), 0)?;
            (y.reshape(&sizes_with(&sizes, hidden))?, routes.top_k_weights.alias()?, 1)
        } else {
            let y = gate(&self.gate_up_proj.multiply(&x.unsqueeze(0)?)?)?;
            let y = self.down_proj.multiply(&y)?; // [experts, N, hidden]
            (y, routes.by_expert(experts)?, 0)
        };
        let y = y.to_dtype(DType::F32)?.mul(&weights.unsqueeze(-1)?)?;
        y.sum_dim(over, false)?.to_dtype(x.dtype()?)
    }
}

/// Whether a device runs each operation as it comes, of any shape.
fn is_eager(device: &str) -> bool {
    ["cpu", "cuda"].iter().any(|eager| device.starts_with(eager))
}

/// `gelu(gate) · up` of `[…, 2 · width]`, whose first half is the gate.
fn gate(gate_up: &Tensor) -> Result<Tensor> {
    let width = gate_up.sizes()?.last().copied().unwrap_or_default() / 2;
    gate_up.narrow(-1, 0, width)?.gelu_tanh()?.mul(&gate_up.narrow(-1, width, width)?)
}

fn sizes_with(sizes: &[i64], last: i64) -> Vec<i64> {
    [sizes, &[last]].concat()
}

impl Router {
    fn load(
        prefix: &str,
        config: &Config,
        experts: usize,
        top_k: usize,
        weights: &mut Weights,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let proj = format!("{prefix}router.proj.weight");
        Ok(Self {
            norm: RmsNorm::without_weight(weights.arithmetic(), config),
            scale: weights.take(&format!("{prefix}router.scale"), &[hidden])?,
            scalar_root_size: (hidden as f64).powf(-0.5),
            proj: Linear::load(weights, &proj, [experts, hidden])?,
            per_expert_scale: weights
                .take(&format!("{prefix}router.per_expert_scale"), &[experts])?,
            top_k: top_k as i64,
        })
    }

    /// `h` `[N, hidden]` → its routes.
    fn forward(&self, h: &Tensor) -> Result<Routes> {
        let x = self.norm.forward(h)?.mul(&self.scale)?.mul_scalar(self.scalar_root_size)?;
        let probabilities = self.proj.forward(&x)?.softmax_last_f32()?;
        let (weights, top_k_index) = probabilities.topk_last(self.top_k)?;
        let weights = weights.div(&weights.sum_dim(-1, true)?)?;
        let scale = self
            .per_expert_scale
            .index_select(0, &top_k_index.reshape(&[-1])?)?
            .reshape(&top_k_index.sizes()?)?;
        Ok(Routes { top_k_weights: weights.mul(&scale)?, top_k_index })
    }
}

impl Routes {
    /// Each expert's weight for each token, `[experts, N]`; zero where it was not chosen.
    fn by_expert(&self, experts: i64) -> Result<Tensor> {
        let all = Tensor::arange(0, experts, &self.top_k_weights)?;
        self.top_k_index
            .unsqueeze(-1)?
            .eq(&all)? // [N, k, experts]
            .to_dtype(DType::F32)?
            .mul(&self.top_k_weights.unsqueeze(-1)?)?
            .sum_dim(1, false)?
            .transpose(0, 1)
    }
}

impl ExpertWeights {
    /// The weights of `experts` `[n]`, in their order.
    fn at(&self, experts: &Tensor) -> Result<Self> {
        let scale = self.scale.as_ref().map(|scale| scale.index_select(0, experts)).transpose()?;
        Ok(Self { weight: self.weight.index_select(0, experts)?, scale })
    }

    /// `x` `[experts or 1, n, in]` → `[experts, n, out]`, with weights as compiled programs have them.
    fn multiply(&self, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight.to_dtype(x.dtype()?)?)?;
        let y = match &self.scale {
            None => y,
            Some(scale) => y.to_dtype(DType::F32)?.mul(scale)?.to_dtype(x.dtype()?)?,
        };
        // As after every projection (linear.rs).
        y.optimization_barrier()
    }
}
