//! What config.json says of rotary position embeddings: one base a layer type, and how frequencies are scaled.

use super::{LayerPlan, LayerType, Rope, family::Family};
use crate::{
    error::{Error, Result},
    json::Keys,
};

/// Bases that are believed.
const THETA: std::ops::RangeInclusive<f64> = 1.0..=1e12;
/// Scaling factors that are believed.
const FACTOR: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

/// Rope by [`LayerType::index`]; `None` for a type no layer has.
///
/// # Errors
/// `Config` naming the key; `Unsupported` for an unknown `rope_type`.
pub(super) fn rope_parameters(
    family: Family,
    text: &Keys<'_>,
    layers: &[LayerPlan],
) -> Result<[Option<Rope>; 2]> {
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
        rope[layer_type.index()] = Some(match family {
            Family::Gemma3 => gemma3_rope(text, layer_type, head_dim)?,
            Family::Gemma4 => gemma4_rope(text, layer_type, head_dim)?,
        });
    }
    Ok(rope)
}

/// Defaults are `Gemma4TextConfig`'s, used only when the whole of `rope_parameters` is absent.
fn gemma4_rope(text: &Keys<'_>, layer_type: LayerType, head_dim: usize) -> Result<Rope> {
    let half = head_dim / 2;
    let Some(all) = text.object("rope_parameters")? else {
        return Ok(match layer_type {
            LayerType::Sliding => Rope { rope_theta: 1e4, rotated: half, factor: 1.0 },
            LayerType::Full => Rope { rope_theta: 1e6, rotated: head_dim / 8, factor: 1.0 },
        });
    };
    let Some(own) = all.object(layer_type.name())? else {
        return Err(all.wrong(layer_type.name(), "expected it, found none".into()));
    };
    let rope_theta = own
        .number("rope_theta", THETA)?
        .ok_or_else(|| own.wrong("rope_theta", "expected a number, found none".into()))?;
    match own.text("rope_type")?.unwrap_or("default") {
        "default" => Ok(Rope { rope_theta, rotated: half, factor: 1.0 }),
        "proportional" => {
            let part = own.number_or("partial_rotary_factor", 1.0, 0.0..=1.0)?;
            let rotated = (part * head_dim as f64 / 2.0) as usize;
            let factor = own.number_or("factor", 1.0, FACTOR)?;
            Ok(Rope { rope_theta, rotated, factor })
        }
        other => Err(unknown_type(&own, other, "default or proportional")),
    }
}

/// The form that transformers 5 saves has `rope_parameters` by layer type. In the published one `rope_theta` and
/// `rope_scaling` are of full layers and `rope_local_base_freq` of sliding ones; it fills in what the other leaves open,
/// except that `rope_scaling` wins (`Gemma3TextConfig.convert_rope_params_to_dict`).
fn gemma3_rope(text: &Keys<'_>, layer_type: LayerType, head_dim: usize) -> Result<Rope> {
    let (theta_key, default_theta) = match layer_type {
        LayerType::Sliding => ("rope_local_base_freq", 1e4),
        LayerType::Full => ("rope_theta", 1e6),
    };
    let saved = match text.object("rope_parameters")? {
        None => None,
        Some(all) if LayerType::ALL.iter().any(|known| all.is_set(known.name())) => {
            all.object(layer_type.name())?
        }
        Some(all) => {
            let expected = "expected parameters by layer type, found none".into();
            return Err(all.wrong(layer_type.name(), expected));
        }
    };
    let scaling = match layer_type {
        LayerType::Sliding => None,
        LayerType::Full => text.object("rope_scaling")?,
    };
    let mut rope_theta = text.number_or(theta_key, default_theta, THETA)?;
    let mut rope = Rope { rope_theta, rotated: head_dim / 2, factor: 1.0 };
    for own in [saved, scaling].into_iter().flatten() {
        // transformers 5.24 overlooks the old name of `rope_type` and would run unscaled.
        if own.is_set("type") && !own.is_set("rope_type") {
            return Err(own.wrong("rope_type", "expected it, found only `type`".into()));
        }
        if own.is_set("partial_rotary_factor") {
            let reason = "expected none in Gemma 3, whose heads turn whole";
            return Err(own.wrong("partial_rotary_factor", reason.into()));
        }
        rope_theta = own.number_or("rope_theta", rope_theta, THETA)?;
        let factor = match own.text("rope_type")? {
            None => rope.factor,
            Some("default") => 1.0,
            Some("linear") => own.number("factor", FACTOR)?.ok_or_else(|| {
                own.wrong(
                    "factor",
                    "expected a number beside `rope_type` linear, found none".into(),
                )
            })?,
            Some(other) => return Err(unknown_type(&own, other, "default or linear")),
        };
        rope = Rope { rope_theta, factor, ..rope };
    }
    Ok(rope)
}

fn unknown_type(own: &Keys<'_>, found: &str, expected: &str) -> Error {
    Error::Unsupported {
        file: own.file().to_owned(),
        what: format!("rope_type `{found}` (expected {expected})"),
    }
}
