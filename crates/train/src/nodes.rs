//! The place of this process among the nodes of a run: from the options, or from what torchrun, SLURM and Kubernetes set; and
//! how the nodes come together. Knows options and the environment; not what nodes do when they are together.

use std::collections::BTreeMap;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use net::{Channel, Facts, Failure, JoinError, LOST, Nodes, Place, Token};

use options::Setting;

use crate::config::{Config, Distributed, Problem};
use crate::device::{Device, DeviceRequest};
use crate::encoded::CACHE_VARIABLE;
use crate::error::{Result, TrainError};
use crate::run::Observer;

/// Environment variables for the secret of a run's nodes, or for the file that holds it.
const TOKEN: &str = "SUROGATE_TOKEN";
const TOKEN_FILE: &str = "SUROGATE_TOKEN_FILE";

/// Smallest length of a token in characters.
const LEAST: usize = 16;

/// The port of the rendezvous under SLURM if none is given.
const PORT: u64 = 29_400;

/// The number of a node, as torchrun, SLURM and indexed Jobs of Kubernetes give it.
const LAUNCHERS: [&str; 3] = ["RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"];

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

/// A variable of the environment; none where it is empty.
type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

fn of_process(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

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

/// True if a Ray cluster is to start the nodes: an address of one is given, or there are several nodes and no launcher
/// gives the number of this one. A number or a rendezvous that is given makes this process one of the nodes.
pub fn starts_on_ray(config: &Config) -> bool {
    is_for_ray(config, &of_process)
}

fn is_for_ray(config: &Config, environment: Environment<'_>) -> bool {
    let of = &config.multi_node.distributed;
    let on_ray = config.is_written("distributed.ray_address");
    launcher(of, on_ray, environment).is_none() && (on_ray || of.most_nodes() > 1)
}

/// Returns the option or variable that makes this process one of the nodes; none if Ray starts them. `on_ray`: the address of
/// a cluster is given.
pub(crate) fn launched_by(of: &Distributed, on_ray: bool) -> Option<&'static str> {
    launcher(of, on_ray, &of_process)
}

fn launcher(of: &Distributed, on_ray: bool, environment: Environment<'_>) -> Option<&'static str> {
    match (&of.node_rank, &of.rendezvous) {
        (Some(_), _) => Some("distributed.node_rank"),
        (None, Some(_)) => Some("distributed.rendezvous"),
        (None, None) => LAUNCHERS.into_iter().find(|name| !on_ray && environment(name).is_some()),
    }
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

/// The least of memory and threads over all nodes.
pub fn least(nodes: &Nodes, own: (usize, usize)) -> std::result::Result<(usize, usize), Failure> {
    let bytes = |of: (usize, usize)| [(of.0 as u64).to_le_bytes(), (of.1 as u64).to_le_bytes()].concat();
    let numbers = |from: &[u8]| {
        let number = |at: usize| from.get(at..at + 8).map_or(0, |of| u64::from_le_bytes(of.try_into().expect("eight")));
        (number(0) as usize, number(8) as usize)
    };
    if nodes.node != 0 {
        nodes.send(0, Channel::Reply, &[&bytes(own)])?;
        return Ok(numbers(&nodes.receive(0, Channel::Command, "the description of the machines")?));
    }
    let mut least = own;
    for node in nodes.others() {
        let of = numbers(&nodes.receive(node, Channel::Reply, "the description of the machines")?);
        least = (least.0.min(of.0), least.1.min(of.1));
    }
    nodes.tell(Channel::Command, &[&bytes(least)])?;
    Ok(least)
}

/// The place of this process among the nodes; None if there are no others.
fn place(config: &Config, environment: Environment<'_>) -> std::result::Result<Option<Place>, Box<Problem>> {
    let of = &config.multi_node.distributed;
    let number = |name: &str| environment(name).and_then(|text| text.parse::<usize>().ok());
    let torchrun =
        number("WORLD_SIZE").filter(|_| environment("RANK").is_some() && environment("MASTER_ADDR").is_some());
    let nodes = config.nodes();
    if let Some(processes) = torchrun.filter(|processes| *processes > 1 && *processes != nodes) {
        let message =
            format!("{processes} processes were started (`WORLD_SIZE`), but `distributed.num_nodes` is {nodes}");
        let hint = format!("set `distributed.num_nodes` to {processes}: every process is a node");
        return Err(Box::new(config.mistake("distributed.num_nodes", message, Some(hint))));
    }
    if nodes == 1 {
        return Ok(None);
    }
    let by_launcher = LAUNCHERS.into_iter().find_map(number);
    let Some(node) = of.node_rank.map(|node| node as usize).or(by_launcher) else {
        let message = format!("`distributed.num_nodes` is {nodes}, but nothing says which of them this is");
        let hint = "give each process its number: `--set distributed.node_rank=0`, 1 and so on; torchrun, srun and \
                    indexed Jobs do by themselves";
        return Err(Box::new(config.mistake("distributed.node_rank", message, Some(hint.into()))));
    };
    if node >= nodes {
        let message = format!("this is node {node}, but `distributed.num_nodes` is {nodes}");
        let hint = Some("nodes are numbered from 0".into());
        return Err(Box::new(config.mistake("distributed.node_rank", message, hint)));
    }
    let Some(rendezvous) = of.rendezvous.clone().or_else(|| rendezvous(environment)) else {
        let message = "nothing says where the nodes find each other".to_owned();
        let hint = "set `distributed.rendezvous: host:port`, an address of node 0 that the others reach";
        return Err(Box::new(config.mistake("distributed.rendezvous", message, Some(hint.into()))));
    };
    if rendezvous.rsplit_once(':').is_none_or(|(host, port)| host.is_empty() || port.parse::<u16>().is_err()) {
        let message = format!("`distributed.rendezvous` is `{rendezvous}`, expected `host:port`");
        return Err(Box::new(config.mistake(
            "distributed.rendezvous",
            message,
            Some("such as `10.0.0.1:29400`".into()),
        )));
    }
    Ok(Some(Place { node, nodes, rendezvous, timeout: Duration::from_secs(of.timeout.into()) }))
}

/// Nodes in a row that are of one host and read the same rows: the processes that torchrun starts on a machine. Those that
/// were started otherwise read for themselves.
pub(crate) fn of_a_host(config: &Config) -> usize {
    together(config, &of_process)
}

fn together(config: &Config, environment: Environment<'_>) -> usize {
    let by_torchrun = config.multi_node.distributed.node_rank.is_none() && environment("RANK").is_some();
    let local = environment("LOCAL_WORLD_SIZE").and_then(|text| text.parse::<usize>().ok());
    let divides = |local: &usize| *local > 0 && config.nodes().is_multiple_of(*local);
    local.filter(|local| by_torchrun && divides(local)).unwrap_or(1)
}

/// The folder in which this node keeps its encoded rows, made for this user alone; none where one node has no folder of its
/// own, or another place is named for encoded rows.
pub(crate) fn own_folder(config: &Config) -> Option<std::result::Result<PathBuf, String>> {
    let written = config.multi_node.distributed.worker_output_dir.as_ref();
    let elsewhere = !config.data.data_cache.is_auto() || of_process(CACHE_VARIABLE).is_some();
    if written.is_none() && (config.nodes() == 1 || elsewhere) {
        return None;
    }
    let node = place(config, &of_process).ok().flatten().map_or(0, |place| place.node) / of_a_host(config);
    let base =
        written.map_or_else(|| temporary_folder(config, &std::env::temp_dir()), |folder| Ok(PathBuf::from(folder)));
    Some(base.and_then(|base| {
        let folder = base.join(format!("node-{node}"));
        options::cache::prepare(&folder).map(|()| folder)
    }))
}

/// `surogate-NAME` of the run in a folder that others may write, of this user alone.
fn temporary_folder(config: &Config, place: &Path) -> std::result::Result<PathBuf, String> {
    let model = || config.model.model.trim_end_matches('/').rsplit('/').next().unwrap_or_default().to_owned();
    let name = config.run.run_name.clone().unwrap_or_else(model);
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let folder = place.join(format!("surogate-{}", name.chars().map(plain).collect::<String>()));
    // Any user may write a link there.
    if std::fs::symlink_metadata(&folder).is_ok_and(|data| data.is_symlink()) {
        return Err(format!("{} is a link", folder.display()));
    }
    options::cache::prepare(&folder).map(|()| folder)
}

/// The rendezvous address that a launcher gives.
fn rendezvous(environment: Environment<'_>) -> Option<String> {
    let port = environment("MASTER_PORT").and_then(|port| port.parse::<u64>().ok());
    if let (Some(host), Some(port)) = (environment("MASTER_ADDR"), port) {
        // There torchrun's own store listens.
        let taken = environment("TORCHELASTIC_RUN_ID").is_some();
        return Some(format!("{host}:{}", port + u64::from(taken)));
    }
    let hosts = environment("SLURM_STEP_NODELIST").or_else(|| environment("SLURM_JOB_NODELIST"))?;
    let job = environment("SLURM_JOB_ID").and_then(|id| id.parse::<u64>().ok()).unwrap_or(0);
    Some(format!("{}:{}", first_host(&hosts), port.unwrap_or(PORT + job % 1000)))
}

/// The first host of a list as SLURM writes it: `gpu[007-009,12],login1` begins with `gpu007`.
fn first_host(hosts: &str) -> String {
    let until = |text: &str, ends: &[char]| text.split(ends).next().unwrap_or_default().to_owned();
    match hosts.split_once('[') {
        Some((prefix, rest)) if !prefix.contains(',') => {
            let (inside, after) = rest.split_once(']').unwrap_or((rest, ""));
            prefix.to_owned() + &until(inside, &['-', ',']) + &until(after, &[','])
        }
        _ => until(hosts, &[',']),
    }
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
    use super::*;
    use crate::config::Task;

    fn config(distributed: &str) -> Config {
        let text = format!("model: m\ndevice: cpu\ndistributed: {distributed}\n");
        Config::load(&text, "run.yaml", Task::Sft, &[]).unwrap_or_else(|p| panic!("{}", options::render_problems(&p)))
    }

    /// The result of options and variables: node, nodes, rendezvous; or the problem.
    fn found(distributed: &str, variables: &[(&str, &str)]) -> std::result::Result<(usize, usize, String), String> {
        let environment = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
        match place(&config(distributed), &environment) {
            Ok(Some(place)) => Ok((place.node, place.nodes, place.rendezvous)),
            Ok(None) => Err("alone".into()),
            Err(problem) => Err(options::render_problems(&[*problem])),
        }
    }

    #[test]
    fn a_place_follows_from_options() {
        let at = |node, nodes, rendezvous: &str| Ok((node, nodes, rendezvous.to_owned()));
        assert_eq!(found("{num_nodes: 3, node_rank: 2, rendezvous: 'h:1'}", &[]), at(2, 3, "h:1"));
        assert_eq!(found("{}", &[]), Err("alone".into()));
        for (options, part) in [
            ("{num_nodes: 2, rendezvous: 'h:1'}", "nothing says which of them this is"),
            ("{num_nodes: 2, node_rank: 2, rendezvous: 'h:1'}", "this is node 2, but `distributed.num_nodes` is 2"),
            ("{num_nodes: 2, node_rank: 0}", "nothing says where the nodes find each other"),
            ("{num_nodes: 2, node_rank: 0, rendezvous: h}", "expected `host:port`"),
            ("{num_nodes: 2, node_rank: 0, rendezvous: 'h:70000'}", "expected `host:port`"),
        ] {
            let problem = found(options, &[]).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn a_folder_in_a_place_of_all_users_is_of_this_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let folder = temporary_folder(&config("{}"), place.path()).unwrap();
        assert_eq!(folder, place.path().join("surogate-m"));
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&folder).unwrap());
        assert_eq!(mode & 0o777, 0o700, "{mode:o}");
        assert_eq!(temporary_folder(&config("{}"), place.path()), Ok(folder.clone()));
        std::fs::remove_dir(&folder).unwrap();
        std::os::unix::fs::symlink(place.path(), &folder).unwrap();
        let why = temporary_folder(&config("{}"), place.path()).unwrap_err();
        assert!(why.ends_with("surogate-m is a link"), "{why}");
    }

    #[test]
    fn processes_of_torchrun_on_a_host_read_the_same_rows() {
        let found = |distributed: &str, variables: &[(&str, &str)]| {
            let get = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
            together(&config(distributed), &get)
        };
        let torchrun = [("RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        assert_eq!(found("{num_nodes: 4}", &torchrun), 2);
        assert_eq!(found("{num_nodes: 4, node_rank: 1}", &torchrun), 1);
        assert_eq!(found("{num_nodes: 3}", &torchrun), 1);
        assert_eq!(found("{num_nodes: 4}", &[("SLURM_PROCID", "1")]), 1);
    }

    #[test]
    fn a_place_follows_from_launchers() {
        let at = |node, nodes, rendezvous: &str| Ok((node, nodes, rendezvous.to_owned()));
        let torchrun = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        assert_eq!(found("{num_nodes: 2}", &torchrun), at(1, 2, "h:29500"));
        let agent = [&torchrun[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(found("{num_nodes: 2}", &agent), at(1, 2, "h:29501"));
        assert_eq!(found("{num_nodes: 2, node_rank: 0, rendezvous: 'x:2'}", &torchrun), at(0, 2, "x:2"));
        for options in ["{}", "{num_nodes: 3}"] {
            let problem = found(options, &torchrun).unwrap_err();
            assert!(problem.contains("2 processes were started") && problem.contains("to 2"), "{problem}");
        }
        let slurm = [("SLURM_PROCID", "3"), ("SLURM_JOB_NODELIST", "gpu[007-010]"), ("SLURM_JOB_ID", "12345")];
        assert_eq!(found("{num_nodes: 4}", &slurm), at(3, 4, "gpu007:29745"));
        let job = [("JOB_COMPLETION_INDEX", "1")];
        assert_eq!(found("{num_nodes: 2, rendezvous: 'run-0.run:29400'}", &job), at(1, 2, "run-0.run:29400"));
    }

    /// The multi-node guide's example, with `device: cpu` taken back: several nodes of GPUs are not available yet.
    #[test]
    fn the_head_of_the_log_is_that_of_the_guide() {
        let mut of = config("{num_nodes: 2, gpus_per_node: 8}");
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
        assert!(headline(&config("{}"), 2048, 1000).is_empty());
        assert_eq!(headline(&config("{num_nodes: 2}"), 32, 5)[2..4], ["Ranks per node: 1", "Total ranks: 2"]);
    }

    #[test]
    fn ray_starts_what_nothing_else_does() {
        let none: &[(&str, &str)] = &[];
        let slurm: &[(&str, &str)] = &[("SLURM_PROCID", "0")];
        for (options, variables, expected) in [
            ("{}", none, false),
            ("{num_nodes: 2}", none, true),
            ("{num_nodes: 2}", slurm, false),
            ("{num_nodes: 2, ray_address: auto}", slurm, true),
            ("{ray_address: local}", none, true),
            ("{max_nodes: 2}", none, true),
            ("{num_nodes: 2, ray_address: auto, node_rank: 1}", none, false),
            ("{num_nodes: 2, rendezvous: 'h:1'}", none, false),
        ] {
            let environment = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|of| of.1.to_owned());
            assert_eq!(is_for_ray(&config(options), &environment), expected, "{options} {variables:?}");
        }
    }

    #[test]
    fn slurm_lists_begin_with_a_host() {
        for (list, first) in
            [("a", "a"), ("a,b[1-2]", "a"), ("n[3,7-9]", "n3"), ("n[01-02],m", "n01"), ("n[1-2]-ib,m", "n1-ib")]
        {
            assert_eq!(first_host(list), first, "{list}");
        }
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
