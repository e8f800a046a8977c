//! A mixture of experts beside a layer's MLP (gemma4.md 2.5, 2.7): each expert multiplies the tokens that go through it.
//!
//! A token's weighted sum runs over its experts by their numbers, so that it has the same bits whatever tokens it comes with.

use half::bf16;

use crate::{
    config::Config,
    error::Result,
    kernels::{Kernels, Matrix, Product, each_row, gated, multiply, norm, norm_in_place},
    weights::{Stack, Weights},
};

/// Weights of one layer's experts. Norms stand in float32.
pub(super) struct Experts {
    /// `router.scale` over the root of the width: the weight of the router's norm.
    router_scale: Vec<f32>,
    router_proj: Matrix, // [experts, hidden]
    per_expert_scale: Vec<f32>,
    top_k: usize,
    eps: f32,
    pre_feedforward_layernorm_2: Vec<f32>,
    gate_proj: Vec<Matrix>, // [width, hidden] each
    up_proj: Vec<Matrix>,   // [width, hidden] each
    down_proj: Vec<Matrix>, // [hidden, width] each
    post_feedforward_layernorm_1: Vec<f32>,
    post_feedforward_layernorm_2: Vec<f32>,
}

/// A token on its way through one expert.
struct Route {
    expert: usize,
    token: usize,
    weight: f32,
}

impl Experts {
    /// `prefix` ends in the layer's number and a point. `None` for models without experts.
    pub(super) fn load(
        prefix: &str,
        config: &Config,
        weights: &mut Weights,
    ) -> Result<Option<Self>> {
        let Some(plan) = config.experts else { return Ok(None) };
        let (hidden, width, experts) =
            (config.hidden_size, plan.moe_intermediate_size, plan.num_experts);
        let root = (hidden as f32).powf(-0.5);
        let mut vector = |name: &str, len| weights.take_vector(&format!("{prefix}{name}"), len);
        let router_scale = vector("router.scale", hidden)?.iter().map(|s| s * root).collect();
        let per_expert_scale = vector("router.per_expert_scale", experts)?;
        let pre_feedforward_layernorm_2 = vector("pre_feedforward_layernorm_2.weight", hidden)?;
        let post_feedforward_layernorm_1 = vector("post_feedforward_layernorm_1.weight", hidden)?;
        let post_feedforward_layernorm_2 = vector("post_feedforward_layernorm_2.weight", hidden)?;
        let router_proj =
            weights.take_stored(&format!("{prefix}router.proj.weight"), [experts, hidden])?;
        let mut take = |fused: &str, parts: &[&str], shape: [usize; 2]| {
            weights.take_stored_experts(&Stack { prefix, fused, parts, experts, shape })
        };
        let mut gate_up =
            take("gate_up_proj", &["gate_proj", "up_proj"], [width, hidden])?.into_iter();
        let mut down = take("down_proj", &["down_proj"], [hidden, width])?.into_iter();
        Ok(Some(Self {
            router_scale,
            router_proj,
            per_expert_scale,
            top_k: plan.top_k_experts,
            eps: config.rms_norm_eps as f32,
            pre_feedforward_layernorm_2,
            gate_proj: gate_up.next().unwrap_or_default(),
            up_proj: gate_up.next().unwrap_or_default(),
            down_proj: down.next().unwrap_or_default(),
            post_feedforward_layernorm_1,
            post_feedforward_layernorm_2,
        }))
    }

    /// `added` `[tokens, hidden]`, which the MLP made, becomes the sum of both branches, each normed; `h` is the residual stream as
    /// the MLP found it. Gives the bytes of weights that were read.
    pub(super) fn beside(&self, kernels: &Kernels, h: &[f32], added: &mut [f32]) -> Result<usize> {
        let (set, eps, width) = (kernels.set, self.eps, self.router_scale.len());
        let tokens = h.len() / width;
        let mut x = vec![bf16::ZERO; h.len()];
        let mut scored = x.clone();
        each_row(kernels, tokens, (&mut x, width), (&mut scored, width), &|token, x, scored| {
            let h = &h[token * width..(token + 1) * width];
            norm(set, h, Some(&self.pre_feedforward_layernorm_2), eps, x);
            norm(set, h, Some(&self.router_scale), eps, scored);
        })?;
        let routes = self.routes(kernels, &scored)?;

        let mut made = vec![0.0; h.len()];
        let mut bytes = self.router_proj.bytes();
        let inner_width = self.down_proj.first().map_or(0, |down| down.shape()[1]);
        for routes in routes.chunk_by(|a, b| a.expert == b.expert) {
            let expert = routes[0].expert;
            let matrices = (&self.gate_proj[expert], &self.up_proj[expert]);
            let down_proj = &self.down_proj[expert];
            let rows: Vec<_> = routes
                .iter()
                .flat_map(|route| &x[route.token * width..(route.token + 1) * width])
                .copied()
                .collect();
            let mut inner = vec![bf16::ZERO; routes.len() * inner_width];
            gated(kernels, &rows, matrices, &mut inner)?;
            let mut out = vec![0.0; routes.len() * width];
            multiply(kernels, &inner, &mut [Product::whole(down_proj, &mut out)])?;
            for (route, out) in routes.iter().zip(out.chunks_exact(width)) {
                let made = &mut made[route.token * width..(route.token + 1) * width];
                for (made, out) in made.iter_mut().zip(out) {
                    *made += route.weight * out;
                }
            }
            bytes += matrices.0.bytes() + matrices.1.bytes() + down_proj.bytes();
        }
        each_row(kernels, tokens, (added, width), (&mut made, width), &|_, added, made| {
            norm_in_place(set, added, &self.post_feedforward_layernorm_1, eps);
            norm_in_place(set, made, &self.post_feedforward_layernorm_2, eps);
            for (added, made) in added.iter_mut().zip(made) {
                *added += *made;
            }
        })?;
        Ok(bytes)
    }

    /// All tokens' routes, by expert and token. `x` `[tokens, hidden]`.
    fn routes(&self, kernels: &Kernels, x: &[bf16]) -> Result<Vec<Route>> {
        let [experts, hidden] = self.router_proj.shape();
        let mut logits = vec![0.0; x.len() / hidden * experts];
        multiply(kernels, x, &mut [Product::whole(&self.router_proj, &mut logits)])?;
        let mut routes = Vec::with_capacity(logits.len() / experts * self.top_k);
        for (token, logits) in logits.chunks_exact(experts).enumerate() {
            let chosen = chosen(logits, self.top_k);
            routes.extend(chosen.into_iter().map(|(expert, share)| Route {
                expert,
                token,
                weight: share * self.per_expert_scale[expert],
            }));
        }
        // Stable: a token's place among others does not change its sums, but is the same each time.
        routes.sort_by_key(|route| route.expert);
        Ok(routes)
    }
}

/// The `count` largest of `logits`, of equal ones the first, each with its share of their softmax.
fn chosen(logits: &[f32], count: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<_> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    order.truncate(count);
    // That of all experts cancels out when shares are made to add up to one.
    let largest = order.first().map_or(0.0, |&first| logits[first]);
    let powers: Vec<_> = order.iter().map(|&expert| (logits[expert] - largest).exp()).collect();
    let total: f32 = powers.iter().sum();
    order.into_iter().zip(powers.into_iter().map(|power| power / total)).collect()
}

#[cfg(test)]
mod tests {
    use super::chosen;

    #[test]
    fn the_largest_are_chosen_the_first_of_equal_ones_and_their_shares_add_up_to_one() {
        let found = chosen(&[0.0, 2.0, -1.0, 2.0, 2.0], 2);
        assert_eq!(found, [(1, 0.5), (3, 0.5)]);
        let shares: f32 = chosen(&[0.5, 1000.0, -1000.0, 3.0], 4).iter().map(|(_, s)| s).sum();
        assert!((shares - 1.0).abs() < 1e-6);
    }
}
