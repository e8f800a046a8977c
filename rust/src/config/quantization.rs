//! `quantization_config` → how weights may be packed (gemma4.md 5.1; compressed-tensors 0.20 `QuantizationConfig`).
//!
//! Which weights are packed is seen from the tensors themselves. Here is said what a packed one may look like, and what this
//! crate does not read is refused by name.

use crate::{
    error::{Error, Result},
    json::Keys,
};

/// How the weights of one config group are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// Bits of an integer: 4 or 8.
    pub(crate) num_bits: usize,
    /// Columns that share a factor; `None`: all columns of a row (strategy `channel`).
    pub(crate) group_size: Option<usize>,
    /// Whether integers stand around zero, without `weight_zero_point`.
    pub(crate) symmetric: bool,
}

impl Scheme {
    /// Whether a weight is one factor times integers around zero in each `size` columns.
    pub(crate) fn has_groups_of(&self, size: usize) -> bool {
        self.symmetric && self.group_size.is_none_or(|found| found.is_multiple_of(size))
    }
}

impl std::fmt::Display for Scheme {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.symmetric { "symmetric" } else { "asymmetric" };
        match self.group_size {
            Some(size) => write!(f, "{} bits, {kind}, groups of {size}", self.num_bits),
            None => write!(f, "{} bits, {kind}, a factor a row", self.num_bits),
        }
    }
}

/// Largest `group_size` that is believed.
const MAX_GROUP_SIZE: usize = 1 << 16;

/// The schemes of all config groups.
///
/// # Errors
/// `Config` naming the key that is wrong, `Unsupported` naming what is not read.
pub(super) fn schemes(quantization: &Keys<'_>) -> Result<Vec<Scheme>> {
    only(quantization, "quant_method", &["compressed-tensors"])?;
    only(quantization, "format", &["pack-quantized"])?;
    only(quantization, "quantization_status", &["compressed"])?;
    absent(quantization, "kv_cache_scheme")?;
    if let Some(sparsity) = quantization.object("sparsity_config")?
        && sparsity.names().next().is_some()
    {
        only(&sparsity, "format", &["dense"])?;
    }
    let groups = quantization.object("config_groups")?.ok_or_else(|| {
        quantization.wrong("config_groups", "expected an object, found none".into())
    })?;
    if groups.names().next().is_none() {
        return Err(quantization.wrong("config_groups", "expected a group, found none".into()));
    }
    groups
        .names()
        .map(|name| match groups.object(name)? {
            Some(group) => scheme(&group),
            None => Err(groups.wrong(name, "expected an object, found null".into())),
        })
        .collect()
}

/// What is packed beside a layer's own projections, as far as config.json tells by names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packs {
    /// The vocabulary tables.
    pub(crate) tables: bool,
    /// The experts' router.
    pub(crate) router: bool,
    /// The experts.
    pub(crate) experts: bool,
}

/// What would be, if a checkpoint were packed as `torchtpu-rs quantize` does by default.
impl Default for Packs {
    fn default() -> Self {
        Self { tables: false, router: false, experts: true }
    }
}

impl std::ops::BitOr for Packs {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            tables: self.tables | other.tables,
            router: self.router | other.router,
            experts: self.experts | other.experts,
        }
    }
}

/// What is packed, by the names that groups target and that `ignore` has.
///
/// # Errors
/// `Config` naming the key that is wrong.
pub(super) fn packs(quantization: &Keys<'_>) -> Result<Packs> {
    let ignored = quantization.texts("ignore")?.unwrap_or_default();
    let leaves = |part: &str| ignored.iter().any(|name| name.contains(part));
    let mut packs = Packs { tables: false, router: !leaves("router"), experts: !leaves("experts") };
    let Some(groups) = quantization.object("config_groups")? else { return Ok(packs) };
    for name in groups.names() {
        let targets = groups.object(name)?.map(|group| group.texts("targets")).transpose()?;
        packs.tables |=
            targets.flatten().is_some_and(|all| all.iter().any(|t| t.contains("embed_tokens")));
    }
    Ok(packs)
}

fn scheme(group: &Keys<'_>) -> Result<Scheme> {
    only(group, "format", &["pack-quantized"])?;
    absent(group, "input_activations")?;
    absent(group, "output_activations")?;
    let weights = group
        .object("weights")?
        .ok_or_else(|| group.wrong("weights", "expected an object, found none".into()))?;
    only(&weights, "type", &["int"])?;
    only(&weights, "strategy", &["group", "channel"])?;
    // "group" stores columns out of order, with `weight_g_idx`; the others are settled before packing.
    only(&weights, "actorder", &["weight", "static"])?;
    absent(&weights, "block_structure")?;
    if weights.flag("dynamic")? {
        return Err(unsupported(&weights, "dynamic", "true", "false"));
    }
    let num_bits = weights.size("num_bits", 64)?;
    if ![4, 8].contains(&num_bits) {
        return Err(unsupported(&weights, "num_bits", &num_bits.to_string(), "4 or 8"));
    }
    // Without a strategy the group size says it: -1 is a whole row (compressed-tensors' `QuantizationArgs`).
    let whole_row = weights.number("group_size", -1.0..=MAX_GROUP_SIZE as f64)? == Some(-1.0);
    let group_size = match weights.text("strategy")? {
        Some("channel") => None,
        None if whole_row => None,
        None if !weights.is_set("group_size") => {
            return Err(unsupported(&weights, "strategy", "none", "group or channel"));
        }
        _ => Some(weights.size("group_size", MAX_GROUP_SIZE)?),
    };
    let symmetric = !weights.is_set("symmetric") || weights.flag("symmetric")?;
    Ok(Scheme { num_bits, group_size, symmetric })
}

/// Refuses values of `key` that are not among `read`; a missing key is one of them.
fn only(keys: &Keys<'_>, key: &str, read: &[&str]) -> Result<()> {
    match keys.text(key)? {
        Some(found) if !read.contains(&found) => {
            Err(unsupported(keys, key, found, &read.join(" or ")))
        }
        _ => Ok(()),
    }
}

fn absent(keys: &Keys<'_>, key: &str) -> Result<()> {
    if keys.is_set(key) {
        return Err(unsupported(keys, key, "a value", "none"));
    }
    Ok(())
}

fn unsupported(keys: &Keys<'_>, key: &str, found: &str, expected: &str) -> Error {
    Error::Unsupported {
        file: keys.file().to_owned(),
        what: format!("a quantized checkpoint with `{key}` {found} (expected {expected})"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn published() -> Value {
        json!({
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "kv_cache_scheme": null, "sparsity_config": {},
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "format": "pack-quantized",
                "input_activations": null, "output_activations": null,
                "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group",
                    "group_size": 32, "dynamic": false, "actorder": null, "block_structure": null},
            }},
        })
    }

    fn read(json: &Value) -> Result<Vec<Scheme>> {
        schemes(&Keys::new(Path::new("config.json"), json.as_object().unwrap()))
    }

    #[test]
    fn the_published_scheme_is_four_bits_in_groups_of_32() {
        let wanted = Scheme { num_bits: 4, group_size: Some(32), symmetric: true };
        assert_eq!(read(&published()).unwrap(), [wanted]);
    }

    #[test]
    fn tables_are_packed_where_a_group_says_so_and_parts_of_a_mixture_unless_they_are_ignored() {
        let mut json = published();
        let found = |json: &Value| {
            packs(&Keys::new(Path::new("config.json"), json.as_object().unwrap())).unwrap()
        };
        assert_eq!(found(&json), Packs { tables: false, router: true, experts: true });
        json["ignore"] = json!(["lm_head", r"re:.*\.router\.proj$"]);
        json["config_groups"]["tables"] = json!({"targets": [r"re:.*\.embed_tokens$"]});
        assert_eq!(found(&json), Packs { tables: true, router: false, experts: true });
        json["ignore"] = json!([r"re:.*\.experts\..*"]);
        assert_eq!(found(&json), Packs { tables: true, router: true, experts: false });
    }

    #[test]
    fn what_is_not_read_is_refused_by_name() {
        let weights = "/config_groups/group_0/weights";
        for (place, key, value) in [
            ("", "quant_method", json!("gptq")),
            ("", "format", json!("float-quantized")),
            ("", "quantization_status", json!("frozen")),
            ("", "kv_cache_scheme", json!({"num_bits": 8})),
            ("/config_groups/group_0", "input_activations", json!({"num_bits": 8})),
            ("/config_groups/group_0", "format", json!("nvfp4-pack-quantized")),
            (weights, "num_bits", json!(3)),
            (weights, "type", json!("float")),
            (weights, "strategy", json!("tensor")),
            (weights, "actorder", json!("group")),
            (weights, "dynamic", json!(true)),
        ] {
            let mut json = published();
            let object = json.pointer_mut(place).unwrap().as_object_mut().unwrap();
            object.insert(key.to_owned(), value);
            let error = read(&json).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{key}: {error}");
            assert!(error.to_string().contains(key), "{error}");
        }
    }

    #[test]
    fn broken_groups_are_errors_that_name_the_key() {
        for (place, key) in [("", "config_groups"), ("/config_groups/group_0", "weights")] {
            let mut json = published();
            json.pointer_mut(place).unwrap().as_object_mut().unwrap().remove(key);
            assert!(read(&json).unwrap_err().to_string().contains(key));
        }
        let mut json = published();
        let weights = json.pointer_mut("/config_groups/group_0/weights").unwrap();
        weights["group_size"] = json!(-1);
        assert!(read(&json).unwrap_err().to_string().contains("group_size"));
    }
}
