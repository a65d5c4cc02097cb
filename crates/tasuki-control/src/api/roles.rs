//! Permissions of the daemon's callers. The daemon's own user and root may do everything; `[api]` in the configuration
//! gives roles to other users.

use axum::http::Method;
use serde::Deserialize;
use utoipa::ToSchema;
use utoipa::openapi::schema::{Array, ArrayBuilder, ObjectBuilder, Type};

use super::peer::Peer;

/// Permissions of a user; each role includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// See the state and the events.
    Read,
    /// Have workers replaced by the programs that the configuration names, and NICs change hands.
    Operate,
    /// Name programs and paths, add and remove nodes, look at frames and secrets, and end everything.
    Administer,
}

impl Role {
    /// Returns the role's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Administer => "administer",
        }
    }
}

/// Users and groups with a role, as user:NAME or group:NAME.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Roles {
    /// Users that may read.
    #[schema(schema_with = texts)]
    pub read: Vec<Who>,
    /// Users that may operate.
    #[schema(schema_with = texts)]
    pub operate: Vec<Who>,
    /// Users that may administer.
    #[schema(schema_with = texts)]
    pub administer: Vec<Who>,
}

fn texts() -> Array {
    ArrayBuilder::new()
        .items(ObjectBuilder::new().schema_type(Type::String).pattern(Some("^(user|group):.+$")).build())
        .build()
}

/// A user, or all of a group, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Who {
    /// The user with this ID.
    User(u32),
    /// All users in the group with this ID.
    Group(u32),
}

impl TryFrom<String> for Who {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (of, file) = match text.split_once(':') {
            Some(("user", name)) if !name.is_empty() => ((Who::User as fn(u32) -> Who, name), "/etc/passwd"),
            Some(("group", name)) if !name.is_empty() => ((Who::Group as fn(u32) -> Who, name), "/etc/group"),
            _ => {
                return Err(format!(
                    "{text:?} names no user or group; write user:NAME or group:NAME, or a number instead of the name"
                ));
            }
        };
        let (who, name) = of;
        let number = name.parse().ok().or_else(|| number_of(&std::fs::read_to_string(file).ok()?, name));
        number.map(who).ok_or_else(|| format!("{text:?} is not in {file}; write a name that is there, or its number"))
    }
}

/// Returns the number of a user or a group, as both files have it: name, password, number.
fn number_of(file: &str, name: &str) -> Option<u32> {
    let mut rows = file.lines().map(|line| line.split(':').collect::<Vec<_>>());
    rows.find(|row| row[0] == name)?.get(2)?.parse().ok()
}

impl Roles {
    /// Returns whether any user besides the daemon's own has a role.
    pub fn are_given(&self) -> bool {
        !(self.read.is_empty() && self.operate.is_empty() && self.administer.is_empty())
    }

    /// Returns the caller's role, if it has one; `own` is the daemon's user.
    pub fn of(&self, peer: &Peer, own: u32) -> Option<Role> {
        if peer.uid == 0 || peer.uid == own {
            return Some(Role::Administer);
        }
        let is_one_of = |all: &[Who]| {
            all.iter().any(|who| match who {
                Who::User(uid) => *uid == peer.uid,
                Who::Group(gid) => peer.groups.contains(gid),
            })
        };
        let all = [(Role::Administer, &self.administer), (Role::Operate, &self.operate), (Role::Read, &self.read)];
        all.into_iter().find(|(_, who)| is_one_of(who)).map(|(role, _)| role)
    }
}

/// Returns the role that a request needs, by its route. Naming a program takes a higher role, which the handler checks.
pub fn needed(method: &Method, route: &str) -> Role {
    match (method, route) {
        (_, "/v1/nodes/{name}/capture" | "/v1/nics/{name}/capture") => Role::Administer,
        // It has secrets, and what programs are started with.
        (_, "/v1/configuration") => Role::Administer,
        (&Method::GET | &Method::HEAD, _) => Role::Read,
        (&Method::POST, "/v1/nodes/{name}/upgrade" | "/v1/nics/{name}/give" | "/v1/nics/{name}/standby") => {
            Role::Operate
        }
        (_, "/v1/nodes/{name}/stage") => Role::Operate,
        _ => Role::Administer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(uid: u32, groups: &[u32]) -> Peer {
        Peer { uid, groups: groups.to_vec(), pid: 1, program: String::new() }
    }

    #[test]
    fn nobody_may_anything_but_root_and_the_daemons_own_user() {
        let roles = Roles::default();
        let of = |uid, groups: &[u32]| roles.of(&peer(uid, groups), 1000);
        assert_eq!((of(0, &[]), of(1000, &[5])), (Some(Role::Administer), Some(Role::Administer)));
        assert_eq!((of(1001, &[0, 1000]), roles.are_given()), (None, false));
    }

    #[test]
    fn the_most_that_somebody_may_counts() {
        let who = |text: &str| Who::try_from(text.to_owned());
        let roles = Roles {
            read: vec![who("group:7").unwrap()],
            operate: vec![who("user:8").unwrap()],
            administer: vec![who("group:9").unwrap()],
        };
        let of = |uid, groups: &[u32]| roles.of(&peer(uid, groups), 1000);
        assert_eq!(
            [of(5, &[6, 7]), of(8, &[7]), of(8, &[9]), of(9, &[8])],
            [Some(Role::Read), Some(Role::Operate), Some(Role::Administer), None]
        );
        assert!(Role::Read < Role::Operate && Role::Operate < Role::Administer && roles.are_given());
        assert_eq!((who("user:root"), who("group:root")), (Ok(Who::User(0)), Ok(Who::Group(0))));
        assert!(who("group:no such group").unwrap_err().contains("is not in /etc/group"));
        assert!(who("root").unwrap_err().contains("write user:NAME or group:NAME"));
    }

    #[test]
    fn what_is_new_takes_an_administrator() {
        assert_eq!(needed(&Method::GET, "/v1/status"), Role::Read);
        assert_eq!(needed(&Method::GET, "/v1/nics/{name}/capture"), Role::Administer);
        assert_eq!(needed(&Method::HEAD, "/v1/nodes/{name}/capture"), Role::Administer);
        assert_eq!(needed(&Method::GET, "/v1/configuration"), Role::Administer);
        assert_eq!(needed(&Method::POST, "/v1/nics/{name}/give"), Role::Operate);
        assert_eq!(needed(&Method::DELETE, "/v1/nodes/{name}"), Role::Administer);
        assert_eq!(needed(&Method::DELETE, "/v1/nodes/{name}/stage"), Role::Operate);
        assert_eq!(needed(&Method::POST, "/v1/upgrade"), Role::Administer);
        assert_eq!(needed(&Method::POST, "/v1/anything"), Role::Administer);
    }
}
