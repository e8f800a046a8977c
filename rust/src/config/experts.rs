//! Keys of a mixture of experts (gemma4.md 1.2): how many there are, how wide each is, how many a token goes through.

use super::MAX_WIDTH;
use crate::{error::Result, json::Keys};

/// Most experts that are believed; 26B-A4B has 128.
const MAX_EXPERTS: usize = 1 << 14;

/// The experts of every layer, beside the MLP that every token goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpertsPlan {
    /// Experts of a layer.
    pub(crate) num_experts: usize,
    /// Experts that a token goes through.
    pub(crate) top_k_experts: usize,
    /// Width of one.
    pub(crate) moe_intermediate_size: usize,
}

/// `None` unless `enable_moe_block` is true.
///
/// # Errors
/// `Config` naming the key that is missing or wrong.
pub(super) fn experts(text: &Keys<'_>) -> Result<Option<ExpertsPlan>> {
    if !text.flag("enable_moe_block")? {
        return Ok(None);
    }
    let plan = ExpertsPlan {
        num_experts: text.size("num_experts", MAX_EXPERTS)?,
        top_k_experts: text.size("top_k_experts", MAX_EXPERTS)?,
        moe_intermediate_size: text.size("moe_intermediate_size", MAX_WIDTH)?,
    };
    if plan.top_k_experts > plan.num_experts {
        return Err(text.wrong(
            "top_k_experts",
            format!(
                "expected at most num_experts {}, found {}",
                plan.num_experts, plan.top_k_experts
            ),
        ));
    }
    Ok(Some(plan))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn parse(json: &Value) -> Result<Option<ExpertsPlan>> {
        experts(&Keys::new(Path::new("config.json"), json.as_object().unwrap()))
    }

    #[test]
    fn the_keys_of_26b_a4b_are_read_only_where_the_block_is_enabled() {
        let mut json = json!({"enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704});
        let plan = ExpertsPlan { num_experts: 128, top_k_experts: 8, moe_intermediate_size: 704 };
        assert_eq!(parse(&json).unwrap(), Some(plan));
        json["enable_moe_block"] = false.into();
        assert_eq!(parse(&json).unwrap(), None);
        // E2B's: the keys are there, and null.
        assert_eq!(parse(&json!({"num_experts": null})).unwrap(), None);
    }

    #[test]
    fn a_missing_or_impossible_number_is_an_error_that_names_its_key() {
        let good = json!({"enable_moe_block": true, "num_experts": 8, "top_k_experts": 8,
            "moe_intermediate_size": 64});
        assert!(parse(&good).is_ok());
        for (key, value) in [
            ("num_experts", Value::Null),
            ("num_experts", json!(1_u64 << 40)),
            ("top_k_experts", json!(9)),
            ("top_k_experts", json!(0)),
            ("moe_intermediate_size", json!("wide")),
        ] {
            let mut bad = good.clone();
            bad[key] = value;
            assert!(parse(&bad).unwrap_err().to_string().contains(key), "{bad}");
        }
    }
}
