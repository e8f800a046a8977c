//! What config.json says of each layer: its type, sizes, whose cache it reads, its rope.

use super::{KeyValues, LayerPlan, LayerType, MAX_WIDTH, Rope};
use crate::{
    error::{Error, Result},
    json::Keys,
};

/// The type of every layer; transformers makes every sixth full when the list is absent, and the last
/// one always.
pub(super) fn layer_types(text: &Keys<'_>, num_hidden_layers: usize) -> Result<Vec<LayerType>> {
    let mut types = match text.texts("layer_types")? {
        None => (1..=num_hidden_layers)
            .map(|i| if i.is_multiple_of(6) { LayerType::Full } else { LayerType::Sliding })
            .collect(),
        Some(names) if names.len() != num_hidden_layers => {
            return Err(text.wrong(
                "layer_types",
                format!(
                    "expected one entry for each of num_hidden_layers {num_hidden_layers}, found {}",
                    names.len()
                ),
            ));
        }
        Some(names) => names
            .into_iter()
            .map(|name| {
                LayerType::ALL.into_iter().find(|known| known.name() == name).ok_or_else(|| {
                    text.wrong(
                        "layer_types",
                        format!("expected sliding_attention or full_attention, found `{name}`"),
                    )
                })
            })
            .collect::<Result<Vec<_>>>()?,
    };
    if let Some(last) = types.last_mut() {
        *last = LayerType::Full;
    }
    Ok(types)
}

/// One plan a layer.
///
/// # Errors
/// `Config` naming the key; `Unsupported` for a drafter.
pub(super) fn layer_plans(text: &Keys<'_>, types: &[LayerType]) -> Result<Vec<LayerPlan>> {
    let shared = text.count_or("num_kv_shared_layers", 0, types.len())?;
    if shared == types.len() {
        return Err(Error::Unsupported {
            file: text.file().to_owned(),
            what: "a drafter, whose layers all share another model's caches".into(),
        });
    }
    let first_shared = types.len() - shared;
    let k_eq_v = text.flag("attention_k_eq_v")?;
    let intermediate_size = text.size("intermediate_size", MAX_WIDTH)?;
    let double_wide = text.flag("use_double_wide_mlp")?;
    let head_dim = text.size_or("head_dim", 256, MAX_WIDTH)?;
    let num_key_value_heads = text.size("num_key_value_heads", MAX_WIDTH)?;
    let overrides = text.object("per_layer_config")?;
    let global_head_dim = text.size_or("global_head_dim", 512, MAX_WIDTH)?;
    // Read only where `attention_k_eq_v` is set, as transformers does; the key may then be null.
    let global_kv_heads = if k_eq_v {
        text.size_or("num_global_key_value_heads", num_key_value_heads, MAX_WIDTH)?
    } else {
        num_key_value_heads
    };

    let plan = |(index, &layer_type): (usize, &LayerType)| {
        let full = layer_type == LayerType::Full;
        let (head_dim, num_key_value_heads) = match &overrides {
            // The form transformers 5.15 and later saves: only what differs from the defaults.
            Some(all) => match all.object(&index.to_string())? {
                Some(own) => (
                    own.size_or("head_dim", head_dim, MAX_WIDTH)?,
                    own.size_or("num_key_value_heads", num_key_value_heads, MAX_WIDTH)?,
                ),
                None => (head_dim, num_key_value_heads),
            },
            None if full => (global_head_dim, global_kv_heads),
            None => (head_dim, num_key_value_heads),
        };
        let key_values = if index < first_shared {
            KeyValues::Own { k_eq_v: k_eq_v && full }
        } else {
            let producer = types[..first_shared].iter().rposition(|&owner| owner == layer_type);
            let Some(producer) = producer else {
                return Err(text.wrong(
                    "num_kv_shared_layers",
                    format!(
                        "expected a {} layer before layer {first_shared}, where sharing begins, \
                         found none",
                        layer_type.name()
                    ),
                ));
            };
            KeyValues::Shared { producer }
        };
        let wide = double_wide && matches!(key_values, KeyValues::Shared { .. });
        let intermediate_size = intermediate_size * if wide { 2 } else { 1 };
        Ok(LayerPlan { layer_type, head_dim, num_key_value_heads, intermediate_size, key_values })
    };
    types.iter().enumerate().map(plan).collect()
}

/// Rope by [`LayerType::index`]; `None` for a type no layer has.
///
/// # Errors
/// `Config` naming the key; `Unsupported` for an unknown `rope_type`.
pub(super) fn rope_parameters(text: &Keys<'_>, layers: &[LayerPlan]) -> Result<[Option<Rope>; 2]> {
    let all = text.object("rope_parameters")?;
    let mut rope = [None, None];
    for layer_type in LayerType::ALL {
        let mut dims = layers.iter().filter(|l| l.layer_type == layer_type).map(|l| l.head_dim);
        let Some(head_dim) = dims.next() else { continue };
        if dims.any(|other| other != head_dim) {
            return Err(text.wrong(
                "per_layer_config",
                format!("expected one head_dim for all {} layers", layer_type.name()),
            ));
        }
        let own = match &all {
            None => None,
            Some(all) => match all.object(layer_type.name())? {
                Some(own) => Some(own),
                None => return Err(all.wrong(layer_type.name(), "expected it, found none".into())),
            },
        };
        rope[layer_type.index()] = Some(one_rope(own.as_ref(), layer_type, head_dim)?);
    }
    Ok(rope)
}

/// Defaults are `Gemma4TextConfig`'s, used only when the whole of `rope_parameters` is absent.
fn one_rope(own: Option<&Keys<'_>>, layer_type: LayerType, head_dim: usize) -> Result<Rope> {
    let half = head_dim / 2;
    let Some(own) = own else {
        return Ok(match layer_type {
            LayerType::Sliding => Rope { rope_theta: 1e4, rotated: half, factor: 1.0 },
            LayerType::Full => Rope { rope_theta: 1e6, rotated: head_dim / 8, factor: 1.0 },
        });
    };
    let rope_theta = own
        .number("rope_theta", 1.0..=1e12)?
        .ok_or_else(|| own.wrong("rope_theta", "expected a number, found none".into()))?;
    match own.text("rope_type")?.unwrap_or("default") {
        "default" => Ok(Rope { rope_theta, rotated: half, factor: 1.0 }),
        "proportional" => {
            let part = own.number_or("partial_rotary_factor", 1.0, 0.0..=1.0)?;
            let rotated = (part * head_dim as f64 / 2.0) as usize;
            let factor = own.number_or("factor", 1.0, 1e-6..=1e6)?;
            Ok(Rope { rope_theta, rotated, factor })
        }
        other => Err(Error::Unsupported {
            file: own.file().to_owned(),
            what: format!("rope_type `{other}` (expected default or proportional)"),
        }),
    }
}
