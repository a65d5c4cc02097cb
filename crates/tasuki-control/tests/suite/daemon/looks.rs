//! Commands that look at the machine, and not at the daemon's nodes.

use super::rig::Rig;

#[test]
fn a_doctor_names_the_daemon_and_leaves_no_group_behind() {
    let rig = Rig::new();
    let doctor = rig.command(&["doctor"]).stdout(std::process::Stdio::piped()).spawn().expect("a program");
    let pid = doctor.id();
    let output = doctor.wait_with_output().expect("it ends");
    let said = String::from_utf8(output.stdout).expect("text");
    println!("{said}");
    let words: Vec<&str> = said.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(words.iter().all(|word| ["ok", "less", "no"].contains(word)) && words.len() > 10);
    assert_eq!(output.status.success(), !words.contains(&"no"), "its status is for scripts");
    let at_work = format!("tasukid is at work in {} (process {})", rig.dir().display(), rig.daemon_pid());
    assert!(said.contains(&at_work), "{said}");
    let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
    let groups = mounts.lines().filter(|line| line.contains(" cgroup")).filter_map(|line| line.split(' ').nth(1));
    for group in groups {
        assert!(!std::path::Path::new(group).join(format!("tasuki/doctor-{pid}")).exists(), "{group}");
    }
}

#[test]
fn shells_and_manuals_know_all_commands() {
    let rig = Rig::without_daemon("", "");
    for shell in ["bash", "zsh", "fish"] {
        let script = rig.ask(&["completions", shell]);
        assert!(["upgrade", "apply", "doctor", "json"].iter().all(|word| script.contains(word)), "{shell}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    rig.ask(&["man", &folder.path().display().to_string()]);
    let page = std::fs::read_to_string(folder.path().join("tasuki-nic-give.1")).expect("a page for each command");
    assert!(page.contains("Give a NIC to another node"), "{page}");
}
