//! The folder in which a node keeps its encoded rows.

use std::path::{Path, PathBuf};

use crate::config::{Config, of_process};
use crate::nodes::place::{of_a_host, place};

/// Names the folder of encoded rows where the options do not.
pub(crate) const CACHE_VARIABLE: &str = "SUROGATE_DATA_CACHE";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_a_place_of_all_users_is_of_this_user_alone() {
        let place = tempfile::tempdir().unwrap();
        let folder = temporary_folder(&Config::of_test_nodes("{}"), place.path()).unwrap();
        assert_eq!(folder, place.path().join("surogate-m"));
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&folder).unwrap());
        assert_eq!(mode & 0o777, 0o700, "{mode:o}");
        assert_eq!(temporary_folder(&Config::of_test_nodes("{}"), place.path()), Ok(folder.clone()));
        std::fs::remove_dir(&folder).unwrap();
        std::os::unix::fs::symlink(place.path(), &folder).unwrap();
        let why = temporary_folder(&Config::of_test_nodes("{}"), place.path()).unwrap_err();
        assert!(why.ends_with("surogate-m is a link"), "{why}");
    }
}
