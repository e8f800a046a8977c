//! What config.json says of each layer: its type, sizes, whose cache it reads.

use super::{KeyValues, LayerPlan, LayerType, MAX_LAYERS, MAX_WIDTH, family::Family};
use crate::{
    error::{Error, Result},
    json::Keys,
};

/// The type of every layer; transformers makes every sixth full when the list is absent (in Gemma 3 the
/// `sliding_window_pattern`-th), and in Gemma 4 the last one always.
pub(super) fn layer_types(
    family: Family,
    text: &Keys<'_>,
    num_hidden_layers: usize,
) -> Result<Vec<LayerType>> {
    let pattern = match family {
        Family::Gemma3 => text.size_or("sliding_window_pattern", 6, MAX_LAYERS)?,
        Family::Gemma4 => 6,
    };
    let mut types = match text.texts("layer_types")? {
        None => (1..=num_hidden_layers)
            .map(|i| if i.is_multiple_of(pattern) { LayerType::Full } else { LayerType::Sliding })
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
    if family == Family::Gemma4
        && let Some(last) = types.last_mut()
    {
        *last = LayerType::Full;
    }
    Ok(types)
}

/// One plan a layer.
///
/// # Errors
/// `Config` naming the key; `Unsupported` for a drafter.
pub(super) fn layer_plans(
    family: Family,
    text: &Keys<'_>,
    types: &[LayerType],
) -> Result<Vec<LayerPlan>> {
    match family {
        Family::Gemma3 => gemma3_plans(text, types),
        Family::Gemma4 => gemma4_plans(text, types),
    }
}

/// All layers have the same sizes and caches of their own.
fn gemma3_plans(text: &Keys<'_>, types: &[LayerType]) -> Result<Vec<LayerPlan>> {
    if text.is_set("per_layer_config") {
        let reason = "expected none in Gemma 3, whose layers have the same sizes";
        return Err(text.wrong("per_layer_config", reason.into()));
    }
    let plan = LayerPlan {
        layer_type: LayerType::Full,
        head_dim: Family::Gemma3.size(text, "head_dim")?,
        num_key_value_heads: Family::Gemma3.size(text, "num_key_value_heads")?,
        intermediate_size: Family::Gemma3.size(text, "intermediate_size")?,
        key_values: KeyValues::Own { k_eq_v: false },
    };
    Ok(types.iter().map(|&layer_type| LayerPlan { layer_type, ..plan.clone() }).collect())
}

fn gemma4_plans(text: &Keys<'_>, types: &[LayerType]) -> Result<Vec<LayerPlan>> {
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
