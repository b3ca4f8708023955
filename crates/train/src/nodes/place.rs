//! The place of this process among the nodes of a run: from the options, or from what torchrun, SLURM and Kubernetes set.
//! Knows options and the environment; not what nodes do when they are together.

use std::time::Duration;

use net::Place;

use crate::config::{Config, Environment, LAUNCHERS, Problem, of_process};

/// The port of the rendezvous under SLURM if none is given.
const PORT: u64 = 29_400;

/// The port of node 0 as torchrun and Kubeflow set it.
const PORT_VARIABLE: &str = "MASTER_PORT";

/// The place of this process among the nodes; None if there are no others.
pub(crate) fn place(config: &Config, environment: Environment<'_>) -> std::result::Result<Option<Place>, Box<Problem>> {
    let of = &config.multi_node.distributed;
    let number = |name: &str| environment(name).and_then(|text| text.parse::<usize>().ok());
    let unreadable = |name: &&str| environment(name).is_some_and(|text| text.parse::<usize>().is_err());
    let ranks = LAUNCHERS.into_iter().filter(|_| of.node_rank.is_none());
    let ports = [PORT_VARIABLE].into_iter().filter(|_| of.rendezvous.is_none());
    if let Some(name) = ranks.chain(ports).filter(|_| config.nodes() > 1).find(unreadable) {
        let message =
            format!("the variable `{name}` is `{}`, expected a number", environment(name).unwrap_or_default());
        let hint = Some("launchers set it; unset it where there is none".to_owned());
        return Err(Box::new(config.mistake("distributed.num_nodes", message, hint)));
    }
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

/// The rendezvous address that a launcher gives.
fn rendezvous(environment: Environment<'_>) -> Option<String> {
    let port = environment(PORT_VARIABLE).and_then(|port| port.parse::<u64>().ok());
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The result of options and variables: node, nodes, rendezvous; or the problem.
    fn found(distributed: &str, variables: &[(&str, &str)]) -> std::result::Result<(usize, usize, String), String> {
        let environment = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
        match place(&Config::of_test_nodes(distributed), &environment) {
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
    fn a_variable_that_is_no_number_is_named() {
        let variables = [("RANK", "x"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500")];
        let problem = found("{num_nodes: 2}", &variables).unwrap_err();
        assert!(problem.contains("`RANK` is `x`, expected a number"), "{problem}");
        let variables = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "abc")];
        let problem = found("{num_nodes: 2}", &variables).unwrap_err();
        assert!(problem.contains("`MASTER_PORT` is `abc`"), "{problem}");
        assert_eq!(found("{num_nodes: 2, node_rank: 0, rendezvous: 'h:1'}", &[("RANK", "x")]).unwrap().0, 0);
        assert_eq!(found("{}", &[("RANK", "x")]), Err("alone".into()));
    }

    #[test]
    fn processes_of_torchrun_on_a_host_read_the_same_rows() {
        let found = |distributed: &str, variables: &[(&str, &str)]| {
            let get = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, v)| (*v).to_owned());
            together(&Config::of_test_nodes(distributed), &get)
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

    #[test]
    fn slurm_lists_begin_with_a_host() {
        for (list, first) in
            [("a", "a"), ("a,b[1-2]", "a"), ("n[3,7-9]", "n3"), ("n[01-02],m", "n01"), ("n[1-2]-ib,m", "n1-ib")]
        {
            assert_eq!(first_host(list), first, "{list}");
        }
    }
}
