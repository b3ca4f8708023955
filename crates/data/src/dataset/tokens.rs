//! `type: tokens`: rows that are already tokenized.

use serde_json::{Map, Value};

use super::columns::{required, wrong};
use super::{EncodeRow, RowForm};
use crate::document::Document;
use crate::document::IGNORE;
use crate::error::{RowError, RowReason};
use crate::remarks::Remarks;

/// Columns `input_ids`, and optionally `labels` (unshifted, -100 = not trained; default: everything is trained),
/// `position_ids` (a document starts where they do not continue), `weights` (of each label).
pub(super) struct TokenRows;

impl EncodeRow for TokenRows {
    fn encode(&self, row: &Map<String, Value>, _: RowForm, _: &mut Remarks) -> Result<Document, RowError> {
        let ids = integers("input_ids", required(row, "input_ids")?)?;
        let optional = |name: &str| row.get(name).filter(|value| !value.is_null());
        let same_length = |name: &str, length: usize| match length == ids.len() {
            true => Ok(()),
            false => {
                let problem = format!("column `{name}` has {length} elements, `input_ids` {}", ids.len());
                Err(RowError::new(RowReason::WrongType, problem))
            }
        };
        let labels = match optional("labels") {
            Some(value) => integers("labels", value)?,
            None => ids.clone(),
        };
        same_length("labels", labels.len())?;
        let positions = optional("position_ids").map(|value| integers("position_ids", value)).transpose()?;
        if let Some(positions) = &positions {
            same_length("position_ids", positions.len())?;
        }
        let mut weights = match optional("weights") {
            Some(value) => reals("weights", value)?,
            None => vec![1.0; ids.len()],
        };
        same_length("weights", weights.len())?;
        for (weight, &label) in weights.iter_mut().zip(&labels) {
            if label == IGNORE {
                *weight = 0.0;
            }
        }
        Ok(Document { ids, labels, weights, positions, ..Document::default() })
    }
}

fn integers(name: &str, value: &Value) -> Result<Vec<i32>, RowError> {
    let list = value.as_array().ok_or_else(|| wrong(name, "a list of integers", value))?;
    let smallest = if name == "labels" { i64::from(IGNORE) } else { 0 };
    let element = |value: &Value| {
        let number = value.as_i64().filter(|&n| n >= smallest).and_then(|n| i32::try_from(n).ok());
        number.filter(|&n| n >= 0 || n == IGNORE).ok_or_else(|| {
            RowError::new(RowReason::WrongType, format!("column `{name}`: {value} is not a valid element"))
        })
    };
    list.iter().map(element).collect()
}

fn reals(name: &str, value: &Value) -> Result<Vec<f32>, RowError> {
    let list = value.as_array().ok_or_else(|| wrong(name, "a list of numbers", value))?;
    let element = |value: &Value| {
        let number = value.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x >= 0.0);
        number.ok_or_else(|| {
            RowError::new(RowReason::WrongType, format!("column `{name}`: {value} is not a finite number from 0"))
        })
    };
    list.iter().map(element).collect()
}
