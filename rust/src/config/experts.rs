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
