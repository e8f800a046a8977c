//! The bytes of a model's weights, counted part by part in the forms in which the loaders keep them.
//!
//! What a form is and how large is for `weights` and `kernels` to say; here is which parts a model has.

use std::collections::HashMap;

use super::{Format, Runs};
use crate::{
    config::{Config, KeyValues as Plan, Scheme},
    kernels::{GROUP_SIZE, MatrixForm},
    weights::{Stored, form_of_scheme},
};

/// Counts a model's weights.
pub(super) struct Count<'a> {
    pub(super) config: &'a Config,
    /// Bytes of an element of the model's type.
    pub(super) element: u128,
    pub(super) format: Format,
    pub(super) runs: Runs,
    /// By Hugging Face's names, what fast mode finds in GGUF files; none where another format is asked about.
    pub(super) stored: HashMap<String, Stored>,
    /// Whether there is a GGUF file: llama.cpp quantizes tables too, whatever config.json packs elsewhere.
    pub(super) has_gguf: bool,
}

/// What weights take up.
#[derive(Clone, Copy)]
pub(super) struct Kept {
    /// In 128 bits: the largest sizes that config.json may have, multiplied, are more than 64 hold.
    pub(super) bytes: u128,
    /// Fewest of a value that fast mode multiplies.
    pub(super) bits: usize,
}

impl std::ops::AddAssign for Kept {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.bits = self.bits.min(other.bits);
    }
}

impl Count<'_> {
    /// How weights of the format are packed; `None` where they are dense.
    fn scheme(&self) -> Option<Scheme> {
        let num_bits = match self.format {
            Format::Dense => return None,
            Format::Int8 => 8,
            Format::Int4 => 4,
        };
        let own = self.config.schemes.iter().find(|scheme| scheme.num_bits == num_bits);
        let what_if = Scheme { num_bits, group_size: Some(GROUP_SIZE), symmetric: true };
        Some(own.copied().unwrap_or(what_if))
    }

    /// Values in the model's type.
    fn plain(&self, count: u128) -> Kept {
        Kept { bytes: count * self.element, bits: 16 }
    }

    /// The projection `name` `[rows, columns]`.
    fn matrix(&self, name: &str, [rows, columns]: [usize; 2]) -> Kept {
        if self.runs == Runs::Fast {
            let form = match (self.stored.get(name), self.scheme()) {
                (Some(stored), _) => stored.form(columns),
                (None, Some(scheme)) => form_of_scheme(scheme, columns),
                (None, None) => MatrixForm::Bf16,
            };
            return Kept { bytes: form.bytes([rows, columns]) as u128, bits: form.bits() };
        }
        let (rows, all) = (rows as u128, rows as u128 * columns as u128);
        match self.format {
            Format::Int8 => Kept { bytes: all + 4 * rows, bits: 8 },
            Format::Int4 if columns.is_multiple_of(GROUP_SIZE) => {
                Kept { bytes: all / 2 + 2 * all / GROUP_SIZE as u128, bits: 4 }
            }
            Format::Dense | Format::Int4 => self.plain(all),
        }
    }

    /// The same, of something that config.json may leave out when it has projections packed.
    fn matrix_if(&self, is_packed: bool, name: &str, shape: [usize; 2]) -> Kept {
        if self.runs == Runs::Fast && !self.has_gguf && !is_packed {
            return self.plain(shape.map(|size| size as u128).iter().product());
        }
        self.matrix(name, shape)
    }

    /// Bytes of the table `name`, that rows are looked up in, if it stays as its file has it.
    fn table_in_file(&self, name: &str, [rows, columns]: [usize; 2]) -> Option<u128> {
        if self.runs != Runs::Fast {
            return None;
        }
        if let Some(stored) = self.stored.get(name) {
            return stored.table_bytes().map(|bytes| bytes as u128);
        }
        let scheme = self.scheme().filter(|_| self.has_gguf || self.config.packs.tables)?;
        let all = rows as u128 * columns as u128;
        let factors = all / scheme.group_size.unwrap_or(columns) as u128;
        Some(all * scheme.num_bits as u128 / 8 + 2 * factors)
    }

    fn table(&self, name: &str, shape: [usize; 2]) -> Kept {
        match self.table_in_file(name, shape) {
            Some(bytes) => Kept { bytes, bits: 16 },
            None => self.plain(shape.map(|size| size as u128).iter().product()),
        }
    }

    /// All weights.
    pub(super) fn weights(&self) -> Kept {
        let (hidden, table) = (self.config.hidden_size, "model.embed_tokens.weight");
        let vocabulary = [self.config.vocab_size, hidden];
        let mut all = self.table(table, vocabulary);
        all += self.plain(hidden as u128);
        // A second form of the table multiplies, unless the one that is looked up in can.
        let compiled = matches!(self.runs, Runs::Compiled { .. });
        if !self.config.tie_word_embeddings {
            all += self.matrix("lm_head.weight", vocabulary);
        } else if compiled || self.table_in_file(table, vocabulary).is_some() {
            all += self.matrix(table, vocabulary);
        }
        let per_layer = self.config.hidden_size_per_layer_input;
        if per_layer > 0 {
            let width = self.config.layers.len() * per_layer;
            let shape = [self.config.vocab_size_per_layer_input, width];
            all += self.table("model.embed_tokens_per_layer.weight", shape);
            all += self.matrix("model.per_layer_model_projection.weight", [width, hidden]);
            all += self.plain(per_layer as u128);
        }
        for index in 0..self.config.layers.len() {
            all += self.layer(index);
        }
        all
    }

    fn layer(&self, index: usize) -> Kept {
        let (layer, hidden) = (&self.config.layers[index], self.config.hidden_size);
        let (dim, width) = (layer.head_dim, layer.intermediate_size);
        let (q, kv) = (self.config.num_attention_heads * dim, layer.num_key_value_heads * dim);
        let per_layer = self.config.hidden_size_per_layer_input;
        let mut norms = 4 * hidden + dim + usize::from(self.config.traits.has_layer_scalar);
        let mut matrices = vec![
            ("self_attn.q_proj", [q, hidden]),
            ("self_attn.o_proj", [hidden, q]),
            ("mlp.gate_proj", [width, hidden]),
            ("mlp.up_proj", [width, hidden]),
            ("mlp.down_proj", [hidden, width]),
        ];
        if let Plan::Own { k_eq_v } = layer.key_values {
            norms += dim;
            matrices.push(("self_attn.k_proj", [kv, hidden]));
            if !k_eq_v {
                matrices.push(("self_attn.v_proj", [kv, hidden]));
            }
        }
        if per_layer > 0 {
            norms += hidden;
            matrices.push(("per_layer_input_gate", [per_layer, hidden]));
            matrices.push(("per_layer_projection", [hidden, per_layer]));
        }
        if let Some(plan) = self.config.experts {
            // Three norms and the router's factors of columns, and its factors of experts.
            norms += 4 * hidden + plan.num_experts;
        }
        let mut all = self.plain(norms as u128);
        let prefix = format!("model.layers.{index}.");
        for (name, shape) in matrices {
            all += self.matrix(&format!("{prefix}{name}.weight"), shape);
        }
        all += self.experts(&prefix);
        all
    }

    /// The experts of a layer, and their router.
    fn experts(&self, prefix: &str) -> Kept {
        let mut all = self.plain(0);
        let Some(plan) = self.config.experts else { return all };
        let packs = self.config.packs;
        let router = [plan.num_experts, self.config.hidden_size];
        all += self.matrix_if(packs.router, &format!("{prefix}router.proj.weight"), router);
        let (hidden, width) = (self.config.hidden_size, plan.moe_intermediate_size);
        let parts = [
            ("gate_up_proj", "gate_proj", [width, hidden]),
            ("gate_up_proj", "up_proj", [width, hidden]),
            ("down_proj", "down_proj", [hidden, width]),
        ];
        for (fused, part, shape) in parts {
            let name = |name: &str| format!("{prefix}experts.{name}");
            let is_fused = self.stored.contains_key(&name(fused));
            let name = name(if is_fused { fused } else { part });
            let one = self.matrix_if(packs.experts, &name, shape);
            all += Kept { bytes: plan.num_experts as u128 * one.bytes, ..one };
        }
        all
    }
}
