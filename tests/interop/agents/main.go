// Command agents runs many stock agents in one process, without their health
// and admin listeners. A thousand processes on a few cores measure the switches
// between processes, not a server.
//
// usage: agents COUNT CHOSEN IDENTIFIERS FLAGS
//
// FLAGS are flags of the stock agent for all agents. The agents have the ids
// agent-0 and so on; the first CHOSEN agents have the given identifiers, the
// others "host=other".
package main

import (
	"fmt"
	"log"
	"os"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"sigs.k8s.io/apiserver-network-proxy/cmd/agent/app/options"
	"sigs.k8s.io/apiserver-network-proxy/pkg/agent"
	"sigs.k8s.io/apiserver-network-proxy/pkg/util"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
	select {}
}

func run(args []string) error {
	if len(args) < 3 {
		return fmt.Errorf("usage: agents COUNT CHOSEN IDENTIFIERS FLAGS")
	}
	count, err := strconv.Atoi(args[0])
	if err != nil {
		return fmt.Errorf("COUNT: %w", err)
	}
	chosen, err := strconv.Atoi(args[1])
	if err != nil {
		return fmt.Errorf("CHOSEN: %w", err)
	}
	for number := range count {
		o := options.NewGrpcProxyAgentOptions()
		if err := o.Flags().Parse(args[3:]); err != nil {
			return err
		}
		o.AgentID = fmt.Sprintf("agent-%d", number)
		o.AgentIdentifiers = "host=other"
		if number < chosen {
			o.AgentIdentifiers = args[2]
		}
		if err := o.Validate(); err != nil {
			return err
		}
		if err := serve(o); err != nil {
			return err
		}
	}
	return nil
}

// serve starts an agent in the way of the stock program's main function.
func serve(o *options.GrpcProxyAgentOptions) error {
	tls, err := util.GetClientTLSConfig(o.CaCert, o.AgentCert, o.AgentKey, o.ProxyServerHost, o.AlpnProtos)
	if err != nil {
		return err
	}
	never := make(chan struct{})
	clients := o.ClientSetConfig(
		grpc.WithTransportCredentials(credentials.NewTLS(tls)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: o.KeepaliveTime, PermitWithoutStream: true,
		}),
	).NewAgentClientSet(never, never)
	announced := agent.NewResponseBasedCounter(clients)
	clients.SetServerCounter(agent.NewAggregateServerCounter(nil, announced, o.ServerCountSource))
	clients.Serve()
	return nil
}
