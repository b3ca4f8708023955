//! The coming together of the nodes of a run: their secret, and the facts that must be equal on all of them.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use net::{Facts, JoinError, LOST, Nodes, Place, Token};
use options::Setting;

use crate::config::{Config, Environment, of_process};
use crate::engine::device::{Device, DeviceRequest};
use crate::error::{Result, TrainError};
use crate::nodes::place::{of_a_host, place};
use crate::run::Observer;

/// Environment variables for the secret of a run's nodes, or for the file that holds it.
const TOKEN: &str = "SUROGATE_TOKEN";

const TOKEN_FILE: &str = "SUROGATE_TOKEN_FILE";

/// Smallest length of a token in characters.
const LEAST: usize = 16;

/// Options that may be other ones on each node: names of places, and where what they name is compared by its contents.
const OWN: &[&str] = &[
    "model",
    "datasets",
    "validation_datasets",
    "adapter",
    "output_dir",
    "checkpoint_dir",
    "run_name",
    "resume_from_checkpoint",
    "data_cache",
    "dataloader_num_workers",
    "distributed",
];

/// Comes together with the other nodes; none where the run has no others.
pub fn come_together(
    config: &Config,
    request: &DeviceRequest,
    observer: &mut dyn Observer,
) -> Result<Option<Arc<Nodes>>> {
    let Some(place) = place(config, &of_process).map_err(|problem| TrainError::Config(vec![*problem]))? else {
        return Ok(None);
    };
    let token = token(&place, &of_process)?;
    let asked = std::cell::RefCell::new(observer);
    let mut note = |text: String| asked.borrow_mut().line(&text);
    let mut stop = || asked.borrow_mut().interrupted();
    let nodes =
        net::join(&place, &token, &facts(config, request), &mut note, &mut stop).map_err(|error| match error {
            JoinError::Stopped => TrainError::Stopped,
            JoinError::Differ(_) => TrainError::Usage(error.to_string()),
            JoinError::Lost(text) => TrainError::Node { text, code: LOST },
            JoinError::Failed(text) => TrainError::Failed(text),
        })?;
    for node in nodes.others() {
        let address = nodes.address(node).map(|address| address.to_string()).unwrap_or_default();
        asked.borrow_mut().line(&format!("Node {} is connected to node {node} at {address}", nodes.node));
    }
    Ok(Some(nodes))
}

/// Facts that must be equal on all nodes before they read anything.
fn facts(config: &Config, request: &DeviceRequest) -> Facts {
    let mut given = config.to_json();
    options::hide_userinfo(&mut given);
    let options = given.as_object().into_iter().flatten().filter(|(name, _)| !OWN.contains(&name.as_str()));
    let mut facts: BTreeMap<String, String> =
        options.map(|(name, value)| (format!("`{name}`"), value.to_string())).collect();
    facts.insert("version of surogate".into(), env!("CARGO_PKG_VERSION").into());
    facts.extend(Device::facts(request));
    facts.insert("task".into(), config.task.name().into());
    facts.insert("`distributed.num_nodes`".into(), config.nodes().to_string());
    facts.insert("nodes of a host".into(), of_a_host(config).to_string());
    facts.insert("ranks of a node".into(), config.local_ranks().to_string());
    Facts(facts)
}

/// The number of processes that train together and their work, a line each; empty with one node.
pub(crate) fn headline(config: &Config, sequence_len: usize, steps: u64) -> Vec<String> {
    if config.nodes() == 1 {
        return Vec::new();
    }
    let on_cpus = config.hardware.device == Setting::Value(crate::config::Device::Cpu);
    let (of_node, all) = if on_cpus { ("Ranks", "ranks") } else { ("GPUs", "GPUs") };
    let rows = config.device_rows() as usize * config.replicas();
    vec![
        format!("Starting distributed training with {} nodes...", config.nodes()),
        format!("Nodes: {}", config.nodes()),
        format!("{of_node} per node: {}", config.local_ranks()),
        format!("Total {all}: {}", config.ranks()),
        format!("Tokens per step: {}", rows * sequence_len),
        format!("Max steps: {steps}"),
    ]
}

/// The shared secret that nodes authenticate with. Processes of one machine that meet on its loopback may do without.
fn token(place: &Place, environment: Environment<'_>) -> Result<Token> {
    let usage = |text: String| Err(TrainError::Usage(text));
    let text = match (environment(TOKEN), environment(TOKEN_FILE).map(PathBuf::from)) {
        (Some(text), _) => text,
        (None, Some(file)) => {
            let text = data::small_file::read_text(&file).map_err(|e| TrainError::io("read", &file, e))?;
            let mode = std::fs::metadata(&file).map_err(|e| TrainError::io("read", &file, e))?.permissions().mode();
            if mode & 0o077 != 0 {
                return usage(format!(
                    "{TOKEN_FILE}: others may read or write {} (mode {:o}), so it is no secret\n  hint: chmod 600 {0}",
                    file.display(),
                    mode & 0o777
                ));
            }
            text
        }
        (None, None) => {
            let found = place.rendezvous.to_socket_addrs().map(Iterator::collect::<Vec<_>>).unwrap_or_default();
            let local = |ip: IpAddr| ip.to_canonical().is_loopback();
            if !found.is_empty() && found.iter().all(|address| local(address.ip())) {
                return Ok(Token::of_user());
            }
            return usage(format!(
                "nodes on several machines prove to each other that they belong together, but {TOKEN} is not set\n  \
                 hint: give all nodes the same secret, such as `export {TOKEN}=$(openssl rand -hex 32)`, or its file in \
                 {TOKEN_FILE}"
            ));
        }
    };
    match text.trim() {
        text if text.chars().count() < LEAST => {
            usage(format!("{TOKEN} has {} characters, expected at least {LEAST}", text.chars().count()))
        }
        text => Ok(Token::new(text)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// The multi-node guide's example, with `device: cpu` taken back: several nodes of GPUs are not available yet.
    #[test]
    fn the_head_of_the_log_is_that_of_the_guide() {
        let mut of = Config::of_test_nodes("{num_nodes: 2, gpus_per_node: 8}");
        of.hardware.device = Setting::Auto;
        (of.training.per_device_train_batch_size, of.training.gradient_accumulation_steps) = (4, 4);
        let expected = [
            "Starting distributed training with 2 nodes...",
            "Nodes: 2",
            "GPUs per node: 8",
            "Total GPUs: 16",
            "Tokens per step: 524288",
            "Max steps: 1000",
        ];
        assert_eq!(headline(&of, 2048, 1000), expected);
        assert!(headline(&Config::of_test_nodes("{}"), 2048, 1000).is_empty());
        assert_eq!(
            headline(&Config::of_test_nodes("{num_nodes: 2}"), 32, 5)[2..4],
            ["Ranks per node: 1", "Total ranks: 2"]
        );
    }

    #[test]
    fn a_secret_is_asked_for_off_this_host() {
        let place =
            |rendezvous: &str| Place { node: 0, nodes: 2, rendezvous: rendezvous.into(), timeout: Duration::ZERO };
        let none = |_: &str| None;
        assert!(token(&place("127.0.0.1:1"), &none).is_ok() && token(&place("[::1]:1"), &none).is_ok());
        let refused = token(&place("10.0.0.1:1"), &none).err().unwrap().to_string();
        assert!(refused.contains("SUROGATE_TOKEN is not set") && refused.contains("openssl rand"), "{refused}");
        let short = |name: &str| (name == TOKEN).then(|| "123".to_owned());
        let refused = token(&place("10.0.0.1:1"), &short).err().unwrap().to_string();
        assert!(refused.contains("3 characters, expected at least 16"), "{refused}");
        let long = |name: &str| (name == TOKEN).then(|| "0123456789abcdef".to_owned());
        assert!(token(&place("10.0.0.1:1"), &long).is_ok());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        let file = |name: &str| (name == TOKEN_FILE).then(|| path.display().to_string());
        for (mode, is_taken) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let found = token(&place("10.0.0.1:1"), &file).err().map(|error| error.to_string());
            assert_eq!(found.is_none(), is_taken, "{mode:o}: {found:?}");
            assert!(
                found.is_none_or(|error| error.contains("others may read or write") && error.contains("chmod 600"))
            );
        }
    }
}
